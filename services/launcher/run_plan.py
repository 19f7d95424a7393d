"""Translation of a run spec into the commands of its replicas. Pure."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from services.common.process.own_version import own_version
from services.common.process.python_command import python_command
from services.common.rpc.errors import ConfigError
from services.common.spec.config import canonical_json
from services.common.spec.spec import parse_shared
from services.common.text.parsing import ParseError, TextLimits, TooLargeError, parse_json
from services.launcher.config.launcher import LauncherConfig, parse_launcher
from services.launcher.security.certificates import identity_folder
from services.launcher.state import LEARNER, ROLLOUT, ReplicaKey, RunMode
from services.launcher.store.run_files import SPEC_FILE

# For each service whose replica may span several machines: the module that runs on the further
# machines, and the table that sets the number of machines and the port for Ray.
_SPANNING = {LEARNER: ("ranks", "rank"), ROLLOUT: ("nodes", "engine")}
# The class of each service's table of a spec.
_TABLES = {
    "env_gateway": "services.env_gateway.config.gateway:EnvGatewayConfig",
    "learner": "services.learner.config.learner:LearnerConfig",
    "rollout": "services.rollout.config.rollout:RolloutConfig",
}
_LIMITS = TextLimits(bytes=2**21, values=2**16)


class BadSpecError(ConfigError):
    """The spec cannot be run; the message names the key and the cause."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Run spec as the launcher understands it. `text` is its canonical JSON."""

    name: str
    text: str
    spec: Mapping[str, Any]
    config: LauncherConfig

    def machines_of(self, service: str) -> int:
        """Return the number of machines of one replica of a service."""
        return count_machines(self.spec, service)

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()


def count_machines(spec: Mapping[str, Any], service: str) -> int:
    """Return the number of machines of one replica of a service. The service must have
    checked the spec."""
    if not may_span(service):
        return 1
    _, table = _SPANNING[service]
    nodes: int = spec.get(service, {}).get(table, {}).get("nodes", 1)
    return nodes


def may_span(service: str) -> bool:
    """Return whether one replica of a service may span several machines."""
    return service in _SPANNING


def machines_key(service: str) -> str:
    """Return the key that sets the number of machines of one replica of a service."""
    _, table = _SPANNING[service]
    return f"{service}.{table}.nodes"


def ray_port_key(service: str) -> str:
    """Return the key that sets the Ray port of a replica's machines."""
    _, table = _SPANNING[service]
    return f"{service}.{table}.ray_port"


def parse_spec(text: str, where: str = "spec") -> RunPlan:
    """Parse the parts of a spec that the launcher reads; `where` names it. Raises ConfigError."""
    try:
        spec = parse_json(text, _LIMITS, strict=True)
    except TooLargeError as error:
        raise BadSpecError(f"the spec is too large: {error}") from error
    except ParseError as error:
        raise BadSpecError(f"the spec is not JSON: {error}") from error
    if not isinstance(spec, dict):
        raise BadSpecError("the spec is not a JSON object")
    name = parse_shared(spec, where=where).name
    config = parse_launcher(spec, where=where)
    return RunPlan(name=name, text=canonical_json(spec), spec=spec, config=config)


def pin_revision(plan: RunPlan, commit: str) -> RunPlan:
    """Return the plan with its model pinned to a commit of the hub."""
    policy = {**plan.spec["policy"], "revision": commit}
    return parse_spec(canonical_json({**plan.spec, "policy": policy}))


def name_writer(plan: RunPlan) -> RunPlan:
    """Return the plan with the Flotilla that writes it, which every service of the run reads."""
    return parse_spec(canonical_json({**plan.spec, "written_by": own_version().to_dict()}))


def make_run_id(name: str, now: datetime, taken: Collection[str]) -> str:
    """Make a run id from the spec name and the UTC time; append a number if it is taken."""
    first = f"{name}-{now:%Y%m%d-%H%M%S}"
    if first not in taken:
        return first
    number = 2
    while f"{first}-{number}" in taken:
        number += 1
    return f"{first}-{number}"


def check_command(
    modules: Mapping[str, str], service: str, overrides: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the command that makes a service validate its own part of a spec, with overrides.

    The spec goes to its standard input: a killed launcher would leave a file behind."""
    entry = modules.get(service, f"services.{service}")
    return python_command("-m", entry, "--config", "-", "--check-config", *overrides)


def tables_command(modules: Mapping[str, str], where: str) -> tuple[str, ...] | None:
    """Return the command that reads the services' tables of the spec on its standard input, in one
    process and without what the services import; None if other modules replace all of them."""
    tables = [f"{name}={place}" for name, place in _TABLES.items() if name not in modules]
    if not tables:
        return None
    return python_command("-m", "services.launcher.control.read_tables", where, *tables)


def replica_command(
    config: LauncherConfig, key: ReplicaKey, run_dir: Path, registry: str, mode: RunMode
) -> tuple[str, ...]:
    """Return the command of one replica. It holds no secrets: any local user can read a
    command line."""
    service, index = key
    command = (
        *python_command("-m", config.modules.get(service, f"services.{service}")),
        *("--config", str(run_dir / SPEC_FILE)),
        *("--run-id", run_dir.name),
        *("--run-dir", str(run_dir)),
        *("--replica", str(index)),
        *_address_arguments(config, service, run_dir),
        *("--registry", registry),
        *(("--metrics-listen", "127.0.0.1:0") if config.metrics else ()),
    )
    if service == LEARNER and mode is RunMode.EVAL_ONLY:
        return (*command, "--learner.mode=eval")
    return command


def further_machine_module(config: LauncherConfig, service: str) -> str:
    """Return the module that a replica's further machines run."""
    room, _ = _SPANNING[service]
    return f"{config.modules.get(service, f'services.{service}')}.{room}"


def _address_arguments(config: LauncherConfig, service: str, run_dir: Path) -> tuple[str, ...]:
    """Return the listen and TLS arguments of a replica on this machine. It gets certificates if
    any replica of the run is reached from other machines; the backend then adds this machine's
    own address."""
    if not config.encrypted:
        return ("--listen", "127.0.0.1:0")
    folder = identity_folder(run_dir.parent, run_dir.name) / service
    certificates = ("--tls-dir", str(folder))
    return certificates if may_span(service) else ("--listen", "127.0.0.1:0", *certificates)
