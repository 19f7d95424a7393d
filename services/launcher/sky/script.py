"""What runs on a machine: the watcher, for as long as there is work, and never longer.

Shell, because SkyPilot runs shell. Secrets are in the environment and on no command line.
"""

import shlex
from dataclasses import dataclass

from services.launcher.runs import LEARNER, ROLLOUT, Key

# In the folder of the code, which SkyPilot makes the working directory.
SPEC_FILE = "spec.json"
RUNS_FOLDER = "runs"
_KILL_AFTER_S = 60
_ADDRESS = "ADDRESS"
_OUTSIDE = "OUTSIDE"
_WEIGHTS = "WEIGHTS"
# Names itself to others: what it is reached by is only known once it runs.
_WHO_AM_I = "https://checkip.amazonaws.com"


@dataclass(frozen=True, slots=True)
class Watched:
    """One replica as its watcher is told about it. `port` is reached from outside if `public`."""

    run_id: str
    key: Key
    module: str
    python: str
    registry: str
    port: int
    public: bool
    hard_limit_s: int
    evaluate: bool = False


def run_script(watched: Watched) -> str:
    """The `run` of a task. It ends when the work ends."""
    words = ("timeout", f"--kill-after={_KILL_AFTER_S}", str(watched.hard_limit_s))
    parts = [shlex.join((*words, *_watcher(watched))), f"-- {shlex.join(_service(watched))}"]
    command = " \\\n  ".join([*parts, *_addresses(watched)])
    lines = ['export PYTHONPATH="$PWD:$PWD/gen${PYTHONPATH:+:$PYTHONPATH}"', *_who_am_i(watched)]
    return "\n".join([*lines, command]) + "\n"


def _watcher(watched: Watched) -> tuple[str, ...]:
    service, index = watched.key
    return (
        *(watched.python, "-m", "services.launcher.unit"),
        *("--config", SPEC_FILE),
        *("--service", service),
        *("--replica", str(index)),
        *("--run-id", watched.run_id),
        *("--run-dir", f"{RUNS_FOLDER}/{watched.run_id}"),
        *("--registry", watched.registry),
    )


def _service(watched: Watched) -> tuple[str, ...]:
    service, index = watched.key
    command = (
        *(watched.python, "-m", watched.module),
        *("--config", SPEC_FILE),
        *("--run-id", watched.run_id),
        *("--run-dir", f"{RUNS_FOLDER}/{watched.run_id}"),
        *("--replica", str(index)),
        *("--registry", watched.registry),
    )
    if service == LEARNER and watched.evaluate:
        return (*command, "--learner.mode=eval")
    return command


def weights_port(port: int) -> int:
    """Where a learner that listens on `port` serves weights, which is a process of its own."""
    return port + 1


def _serves_outside(watched: Watched) -> bool:
    """A rollout calls the others, and is called by nobody beyond its machine."""
    return watched.public and watched.key[0] != ROLLOUT


def _who_am_i(watched: Watched) -> list[str]:
    """Shell that finds the machine's address; RunPod and Vast map ports to others outside."""
    if not watched.public:
        return [f'{_ADDRESS}="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"']
    if not _serves_outside(watched):
        return []
    lines = [f'{_OUTSIDE}="${{RUNPOD_PUBLIC_IP:-${{PUBLIC_IPADDR:-$(curl -fsS {_WHO_AM_I})}}}}"']
    if watched.key[0] == LEARNER:
        lines.append(f'{_WEIGHTS}="${_OUTSIDE}:{_mapped(weights_port(watched.port))}"')
    return [*lines, f'{_OUTSIDE}="${_OUTSIDE}:{_mapped(watched.port)}"']


def _mapped(port: int) -> str:
    """Shell for the port outside that is `port` here."""
    return f"${{RUNPOD_TCP_PORT_{port}:-${{VAST_TCP_PORT_{port}:-{port}}}}}"


def _addresses(watched: Watched) -> list[str]:
    """Arguments with shell variables in them."""
    if _serves_outside(watched):
        listen = [f"--listen=0.0.0.0:{watched.port}", f'--advertise="${_OUTSIDE}"']
        return [*listen, *_weights(watched)] if watched.key[0] == LEARNER else listen
    # On Slurm several replicas may share a machine, so its ports are not ours to choose.
    return ["--listen=127.0.0.1:0" if watched.public else f'--listen="${_ADDRESS}:0"']


def _weights(watched: Watched) -> list[str]:
    """Over a public network they go by gRPC under TLS, and from a port that is opened."""
    return [
        "--learner.weights.network=public",
        f"--learner.weights.port={weights_port(watched.port)}",
        f'--learner.weights.advertise="${_WEIGHTS}"',
    ]
