"""Actions that the control loop takes on a run and its replicas."""

from dataclasses import dataclass

from flotilla_launcher.state import ReplicaKey


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Start a process for this replica."""

    key: ReplicaKey


@dataclass(frozen=True, slots=True)
class DrainReplica:
    """Request that this replica finish and exit."""

    key: ReplicaKey


@dataclass(frozen=True, slots=True)
class KillReplica:
    """Kill this replica and all its children now."""

    key: ReplicaKey


@dataclass(frozen=True, slots=True)
class CleanRun:
    """Free the run's remaining resources, and search for leaks."""


@dataclass(frozen=True, slots=True)
class RunNote:
    """Message for people in the run's events."""

    text: str


RunAction = StartReplica | DrainReplica | KillReplica | CleanRun
