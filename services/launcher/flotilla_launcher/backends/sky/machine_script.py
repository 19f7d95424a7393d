"""Script of a machine: it runs the watcher, and ends with the work.

Shell, because SkyPilot runs shell. Secrets are in the environment and on no command line."""

import shlex
from dataclasses import dataclass

from flotilla_common.process.python_command import python_command
from flotilla_launcher.run_spec import machines_key, ray_port_key
from flotilla_launcher.security.sealed_secrets import KEY_FILE
from flotilla_launcher.state import LEARNER, ROLLOUT, ReplicaKey

# Paths in the folder of the code, which SkyPilot makes the working directory.
SPEC_FILE = "spec.json"
RUNS_FOLDER = "runs"
_KILL_AFTER_S = 60
_ADDRESS = "ADDRESS"
_OUTSIDE = "OUTSIDE"
_WEIGHTS = "WEIGHTS"
_RANK = "SKYPILOT_NODE_RANK"
# A machine's own commit of Flotilla precedes an installed one, with modules that somebody put next
# to its packages. Another project's files do not.
OWN_CODE = (
    "if [ -d gen/flotilla ]; then"
    ' for d in "$PWD" "$PWD"/services/* "$PWD"/environments "$PWD"/gen; do'
    ' export PYTHONPATH="$d${PYTHONPATH:+:$PYTHONPATH}"; done; fi'
)
# Returns a machine's public address, which is only known once it runs.
_WHO_AM_I = "https://checkip.amazonaws.com"


@dataclass(frozen=True, slots=True)
class WatchedReplica:
    """One replica as its watcher's command line describes it. `port` is reached from outside if
    `public`."""

    run_id: str
    key: ReplicaKey
    module: str
    python: str
    registry: str
    port: int
    public: bool
    hard_limit_s: int
    evaluate: bool = False
    # Machines of the replica, and the module that runs on all but the first.
    nodes: int = 1
    further_module: str = ""
    # Whether it serves Prometheus, on the machine itself.
    metrics: bool = False


def run_script(watched: WatchedReplica) -> str:
    """Return the `run` of a task, on each of its machines. It ends when the work ends."""
    lines = [OWN_CODE, *_find_address_lines(watched)]
    command = _first_machine_command(watched)
    if watched.nodes > 1:
        command = (
            f'if [ "${_RANK}" = 0 ]; then\n{command}\nelse\n{_further_machine_command(watched)}\nfi'
        )
    return "\n".join([*lines, command]) + "\n"


def _first_machine_command(watched: WatchedReplica) -> str:
    run_dir = f"{RUNS_FOLDER}/{watched.run_id}"
    service = shlex.join(_service_command(watched, run_dir))
    return _join_parts(
        [_watcher_command(watched, run_dir), f"-- {service}", *_address_arguments(watched)]
    )


def _join_parts(parts: list[str]) -> str:
    return " \\\n  ".join(parts)


def _further_machine_command(watched: WatchedReplica) -> str:
    """Return the command of a replica's further machines, which are given the first one's
    address."""
    service, index = watched.key
    # On Slurm machines may share a file system, and the folder of the run is the first one's.
    run_dir = f"{RUNS_FOLDER}/{watched.run_id}.{service}-{index}.nodes"
    machine = (
        *python_command("-m", watched.further_module, executable=watched.python),
        *("--config", SPEC_FILE),
        *("--run-id", watched.run_id),
        *("--run-dir", run_dir),
        *_several_machines_arguments(watched),
    )
    return _join_parts(
        [
            f'{_watcher_command(watched, run_dir)} --node="${_RANK}"',
            f"-- {shlex.join(machine)}",
            f'--replica="${_RANK}"',
            # Only its host counts: Ray has its own port, and the service is not called.
            f'--peer="{service}=${_ADDRESS}:0"',
        ]
    )


def _several_machines_arguments(watched: WatchedReplica) -> tuple[str, ...]:
    """Return the arguments that all machines of a replica share: Ray joins them, on a port beside
    those that the run has anyway. SkyPilot's own Ray has others."""
    if watched.nodes == 1:
        return ()
    service, _ = watched.key
    port = ray_port(watched.port, watched.key)
    return (f"--{machines_key(service)}={watched.nodes}", f"--{ray_port_key(service)}={port}")


def _watcher_command(watched: WatchedReplica, run_dir: str) -> str:
    service, index = watched.key
    words = (
        *("timeout", f"--kill-after={_KILL_AFTER_S}", str(watched.hard_limit_s)),
        *python_command("-m", "flotilla_launcher.agent", executable=watched.python),
        *("--config", SPEC_FILE),
        *("--service", service),
        *("--replica", str(index)),
        *("--run-id", watched.run_id),
        *("--run-dir", run_dir),
        *("--registry", watched.registry),
        *("--seal-key", KEY_FILE),
    )
    return shlex.join(words)


def _service_command(watched: WatchedReplica, run_dir: str) -> tuple[str, ...]:
    service, index = watched.key
    command = (
        *python_command("-m", watched.module, executable=watched.python),
        *("--config", SPEC_FILE),
        *("--run-id", watched.run_id),
        *("--run-dir", run_dir),
        *("--replica", str(index)),
        *("--registry", watched.registry),
        *(("--metrics-listen", "127.0.0.1:0") if watched.metrics else ()),
        *_several_machines_arguments(watched),
    )
    if service == LEARNER and watched.evaluate:
        return (*command, "--learner.mode=eval")
    return command


def weights_port(port: int) -> int:
    """Return the port where a learner that listens on `port` serves weights, in a process of
    its own."""
    return port + 1


def ray_port(port: int, key: ReplicaKey) -> int:
    """Return the port where Ray joins further machines to a replica, of a run with `port`: replicas
    that share a machine, as on Slurm, have each their own."""
    service, index = key
    return port + 2 if service == LEARNER else port + 3 + index


def _serves_outside(watched: WatchedReplica) -> bool:
    """Return whether other machines call the service; a rollout is only called on its own."""
    return watched.public and watched.key[0] != ROLLOUT


def _find_address_lines(watched: WatchedReplica) -> list[str]:
    """Return shell lines that find the machine's address; RunPod and Vast map ports to others
    outside."""
    if not watched.public:
        return [f'{_ADDRESS}="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"']
    if not _serves_outside(watched):
        return []
    lines = [f'{_OUTSIDE}="${{RUNPOD_PUBLIC_IP:-${{PUBLIC_IPADDR:-$(curl -fsS {_WHO_AM_I})}}}}"']
    if watched.key[0] == LEARNER:
        lines.append(f'{_WEIGHTS}="${_OUTSIDE}:{_mapped_port(weights_port(watched.port))}"')
    return [*lines, f'{_OUTSIDE}="${_OUTSIDE}:{_mapped_port(watched.port)}"']


def _mapped_port(port: int) -> str:
    """Return shell for the port outside that is `port` here."""
    return f"${{RUNPOD_TCP_PORT_{port}:-${{VAST_TCP_PORT_{port}:-{port}}}}}"


def _address_arguments(watched: WatchedReplica) -> list[str]:
    if _serves_outside(watched):
        listen = [f"--listen=0.0.0.0:{watched.port}", f'--advertise="${_OUTSIDE}"']
        return [*listen, *_weight_arguments(watched)] if watched.key[0] == LEARNER else listen
    if watched.public:
        return ["--listen=127.0.0.1:0"]
    # On Slurm several replicas may share a machine, so its ports cannot be fixed.
    return [f'--listen="${_ADDRESS}:0"']


def _weight_arguments(watched: WatchedReplica) -> list[str]:
    """Return the arguments for weights, which cross a public network by gRPC under TLS, and
    from a port that is opened."""
    return [
        "--learner.weights.network=public",
        f"--learner.weights.port={weights_port(watched.port)}",
        f'--learner.weights.advertise="${_WEIGHTS}"',
    ]
