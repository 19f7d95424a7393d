"""Construction of a replica's launch spec from its run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.process.python_command import python_command
from flotilla_launcher.backends.ports import LaunchSpec
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.ports import Registry
from flotilla_launcher.run_spec import RunSpec, may_span
from flotilla_launcher.security.certificates import identity_folder
from flotilla_launcher.security.service_variables import inherited_variables
from flotilla_launcher.state import LEARNER, ReplicaKey, Run, RunMode
from flotilla_launcher.store.run_files import SPEC_FILE, log_path


@dataclass(frozen=True, slots=True)
class _NoRegistry:
    address: str = ""

    def secrets_for(self, service: str) -> Mapping[str, str]:
        return {}


# Registry of a launch that is only planned.
NO_REGISTRY = _NoRegistry()


def make_launch_spec(
    run: Run, key: ReplicaKey, spec: RunSpec, run_dir: Path, registry: Registry
) -> LaunchSpec:
    """Make the launch spec for the next start of a replica of this run."""
    replica = run.replicas.get(key)
    return LaunchSpec(
        run_id=run.run_id,
        key=key,
        command=replica_command(spec, key, run_dir, registry.address, run.mode),
        secrets=registry.secrets_for(key[0]),
        log=log_path(run_dir, key),
        gpus=spec.config.gpu_counts()[key[0]],
        attempt=replica.attempt if replica else 1,
        mode=run.mode,
        registry=registry.address,
        spec=spec,
        inherits=inherited_variables(spec, key[0]),
    )


def replica_command(
    spec: RunSpec, key: ReplicaKey, run_dir: Path, registry: str, mode: RunMode
) -> tuple[str, ...]:
    """Return the command of one replica. It holds no secrets: any local user can read a
    command line."""
    service, index = key
    command = (
        *python_command("-m", spec.module_of(service)),
        *("--config", str(run_dir / SPEC_FILE)),
        *("--run-id", run_dir.name),
        *("--run-dir", str(run_dir)),
        *("--replica", str(index)),
        *_address_arguments(spec.config, service, run_dir),
        *("--registry", registry),
        *(("--metrics-listen", "127.0.0.1:0") if spec.config.metrics else ()),
    )
    if service == LEARNER and mode is RunMode.EVAL_ONLY:
        return (*command, "--learner.mode=eval")
    return command


def _address_arguments(config: LauncherConfig, service: str, run_dir: Path) -> tuple[str, ...]:
    """Return the listen and TLS arguments of a replica on this machine. It gets certificates if
    any replica of the run is reached from other machines; the backend then adds this machine's
    own address."""
    if not config.encrypted:
        return ("--listen", "127.0.0.1:0")
    folder = identity_folder(run_dir.parent, run_dir.name) / service
    certificates = ("--tls-dir", str(folder))
    return certificates if may_span(service) else ("--listen", "127.0.0.1:0", *certificates)
