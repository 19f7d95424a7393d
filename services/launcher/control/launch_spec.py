"""From a run to the start of one of its replicas."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.launcher.config.launcher import LauncherConfig
from services.launcher.plan import log_path, replica_command
from services.launcher.ports import Launch, Registry
from services.launcher.security.env_filter import inherited
from services.launcher.state import Key, Run


@dataclass(frozen=True, slots=True)
class _Nowhere:
    address: str = ""

    def secrets(self, service: str) -> Mapping[str, str]:
        return {}


# Of a launch that is only talked about.
NOWHERE = _Nowhere()


def launch_of(
    run: Run, key: Key, config: LauncherConfig, spec_json: str, run_dir: Path, registry: Registry
) -> Launch:
    """How a replica of this run is started next."""
    replica = run.replicas.get(key)
    return Launch(
        run_id=run.run_id,
        key=key,
        command=replica_command(config, key, run_dir, registry.address, run.mode),
        secrets=registry.secrets(key[0]),
        log=log_path(run_dir, key),
        gpus=config.gpus()[key[0]],
        attempt=replica.attempt if replica else 1,
        mode=run.mode,
        registry=registry.address,
        spec_json=spec_json,
        config=config,
        inherits=inherited(json.loads(spec_json), config, key[0]),
    )
