"""Actions that the control loop takes on a run and its replicas."""

from dataclasses import dataclass

from services.launcher.state import ReplicaKey


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Start a process for this replica."""

    key: ReplicaKey


@dataclass(frozen=True, slots=True)
class DrainReplica:
    """Ask this replica to finish and exit."""

    key: ReplicaKey


@dataclass(frozen=True, slots=True)
class KillReplica:
    """End this replica and all its children now."""

    key: ReplicaKey


@dataclass(frozen=True, slots=True)
class CleanRun:
    """Free what is left of the run, and look for it."""


@dataclass(frozen=True, slots=True)
class RunNote:
    """Message for people in the run's events."""

    text: str


RunAction = StartReplica | DrainReplica | KillReplica | CleanRun | RunNote
