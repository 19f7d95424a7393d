"""Reports from agents on other machines, and the commands sent in reply."""

import re
from dataclasses import dataclass
from enum import StrEnum

from flotilla_launcher.state import LEARNER, ExitStatus, ReplicaKey

# Exit code of a watcher whose machine was preempted.
EXIT_PREEMPTED = 75


class ReplicaCommand(StrEnum):
    """Command to a replica, in the reply to its heartbeat."""

    NONE = "none"
    DRAIN = "drain"
    STOP = "stop"
    # To a watcher whose process has ended: start it again.
    START = "start"


class UnitPhase(StrEnum):
    """Phases of a replica's machine, as its watcher reports them."""

    SETUP = "setup"
    RUNNING = "running"
    PREEMPTED = "preempted"
    # Its process has ended, and it waits for START, DRAIN or STOP.
    WAITING = "waiting"
    # Its process has ended, and so does it.
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class UnitReport:
    """Report of the watcher on a replica's machine; `exit` is set if it is WAITING or EXITED.
    `restarts` counts the commands to START that it has obeyed."""

    phase: UnitPhase
    exit: ExitStatus | None = None
    hostname: str = ""
    restarts: int = 0

    @property
    def is_of_loss(self) -> bool:
        """True if the machine is being taken away."""
        ended = self.exit is not None and self.exit.code == EXIT_PREEMPTED
        return ended or self.phase is UnitPhase.PREEMPTED


def key_of_node(key: ReplicaKey, node: int) -> ReplicaKey:
    """Return the key of a replica's machine; machine 0 has the replica's own key."""
    return (f"{_name_of(key)}-node", node) if node else key


def _name_of(key: ReplicaKey) -> str:
    """Return the log name prefix of a replica. A run has one learner, so it has no number."""
    return key[0] if key[0] == LEARNER else f"{key[0]}-{key[1]}"


def is_side_log(key: ReplicaKey, node: int, name: str) -> bool:
    """Return whether a service may keep a log of this name beside its own on that machine.

    A learner keeps logs of its ranks: `learner-rank-0`, and `learner-node-1-rank-2` on a
    further machine. A rollout keeps logs of its engine's workers:
    `rollout-0-node-0-worker-0` on the first machine."""
    service, number = key_of_node(key, node)
    own = _name_of(key)
    prefixes = (f"{service}-{number}",) if node else (key[0], own, f"{own}-node-0")
    begins = "|".join(map(re.escape, prefixes))
    return re.fullmatch(rf"(?:{begins})-(?!node-)[a-z][a-z0-9-]*", name) is not None
