"""Construction of a replica's launch spec from its run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.launcher.backends.ports import LaunchSpec
from services.launcher.config.launcher import LauncherConfig
from services.launcher.ports import Registry
from services.launcher.run_plan import replica_command
from services.launcher.security.env_filter import inherited_variables
from services.launcher.state import ReplicaKey, Run
from services.launcher.store.run_files import log_path


@dataclass(frozen=True, slots=True)
class _NoRegistry:
    address: str = ""

    def secrets_for(self, service: str) -> Mapping[str, str]:
        return {}


# Registry of a launch that is only planned.
NO_REGISTRY = _NoRegistry()


def make_launch_spec(
    run: Run,
    key: ReplicaKey,
    config: LauncherConfig,
    spec_json: str,
    run_dir: Path,
    registry: Registry,
) -> LaunchSpec:
    """Make the launch spec for the next start of a replica of this run."""
    replica = run.replicas.get(key)
    return LaunchSpec(
        run_id=run.run_id,
        key=key,
        command=replica_command(config, key, run_dir, registry.address, run.mode),
        secrets=registry.secrets_for(key[0]),
        log=log_path(run_dir, key),
        gpus=config.gpu_counts()[key[0]],
        attempt=replica.attempt if replica else 1,
        mode=run.mode,
        registry=registry.address,
        spec_json=spec_json,
        config=config,
        inherits=inherited_variables(json.loads(spec_json), config, key[0]),
    )
