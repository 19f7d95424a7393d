"""Port of the backends: a replica to start, what becomes of it, and how a start may fail."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.launcher.config.launcher import LauncherConfig
from services.launcher.state import ExitStatus, ReplicaKey, RunMode, Unit


class BackendError(Exception):
    """A replica cannot be started, now or later. The message says why."""


class CapacityError(BackendError):
    """No such machine is available at present. Another attempt may find one, perhaps
    elsewhere."""


class SetupError(BackendError):
    """There was a machine, and it could not be made ready. Another one may work."""


class StartLostError(BackendError):
    """Somebody else ended the replica before it was started, or the backend failed during
    the start. The next start may succeed. It counts as a crash of the replica."""


class BackendUnreachable(Exception):
    """The backend cannot be asked, so nothing is known: nothing is torn down, nothing counted.

    Any method of a backend may raise it; the launcher asks again.
    """


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Specification of one replica to start. `secrets` are for it alone and are written
    nowhere.

    `command` is for this machine, and so are the variables that it `inherits`. A backend of
    other machines builds its own from the rest."""

    run_id: str
    key: ReplicaKey
    command: tuple[str, ...]
    secrets: Mapping[str, str]
    log: Path
    gpus: int = 0
    # Of asking for a machine, counted from 1: another attempt may go to the next candidate.
    attempt: int = 1
    mode: RunMode = RunMode.TRAIN
    # host:port of the run's registry, as it is listened on.
    registry: str = ""
    spec_json: str = ""
    config: LauncherConfig = field(default_factory=LauncherConfig)
    inherits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the replica, unique among all that the backend runs and the same for every
        start."""
        return f"{self.run_id}/{self.key[0]}-{self.key[1]}"


@dataclass(frozen=True, slots=True)
class ResourceOffer:
    """Resources that a backend would use for one replica: for people, with the task file of
    the backend if it has one."""

    resources: str
    task_yaml: str = ""
    # US dollars for one replica; None where nobody knows a price.
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class CleanupEvidence:
    """Result of asking a backend whether anything of a run is left."""

    gone: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class OrphanResource:
    """Resource that is ours and belongs to no active run, by its name at the backend.
    `run_id` is empty if the name does not say whose it is."""

    name: str
    run_id: str = ""
    # What it is, for people.
    detail: str = ""


class Backend(Protocol):
    """Backend that runs replicas somewhere. All methods may be repeated; a name identifies a
    replica.

    Output of a replica is appended to `LaunchSpec.log`, wherever it runs."""

    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        """Return the resources that starting this would use. Raises BackendError if they
        cannot be had."""
        ...

    async def start_replica(self, launch: LaunchSpec) -> Unit:
        """Start a replica; may take minutes on machines that must be found first.

        Raises CapacityError, SetupError, StartLostError, BackendError. `undo_start` ends
        what a failed or cancelled start leaves."""
        ...

    async def attach_replica(self, launch: LaunchSpec, unit: Unit) -> bool:
        """Take over a replica that an earlier launcher started. False: it is gone.

        After True the unit may be waited for, drained and killed like one of our own.
        """
        ...

    async def find_replica(self, launch: LaunchSpec) -> Unit | None:
        """Return the replica that a start of this has left, if any. Nobody recorded the
        result of that start."""
        ...

    async def undo_start(self, launch: LaunchSpec) -> None:
        """End what a start of this has left, if anything. It is no longer wanted."""
        ...

    async def price_per_hour(self, launch: LaunchSpec) -> float | None:
        """Return the price of the replica's present machines in US dollars per hour; None if
        it is not known."""
        ...

    async def wait_for_exit(self, unit: Unit) -> ExitStatus:
        """Return once the replica *and all it started* are gone."""
        ...

    async def drain_replica(self, unit: Unit) -> None:
        """Ask the replica to finish and exit, by the platform's own means if there are any."""
        ...

    async def kill_replica(self, unit: Unit) -> None:
        """End the replica and all it started, now."""
        ...

    async def list_orphans(self, known: Collection[Unit]) -> list[Unit]:
        """Return those of the known units that still run, and those that an earlier launcher
        started here unrecorded."""
        ...

    async def end_orphan(self, unit: Unit, grace_s: float) -> None:
        """End an orphan: ask, wait for up to `grace_s`, then kill."""
        ...

    async def clean_run(self, run_id: str) -> CleanupEvidence:
        """Free what a run that has ended left behind, then look whether anything is left."""
        ...

    async def list_orphan_resources(self, active: Collection[str]) -> list[OrphanResource]:
        """List what is ours and belongs to no run in `active`.

        Runs may begin and become active during the look. A run counts as active or not only
        after the look."""
        ...

    async def reap_orphans(self, active: Collection[str]) -> list[str]:
        """End these resources and return what was ended. Called periodically."""
        ...


# By the name in `launcher.backend`. Called once, when the first run needs it; raises BackendError
# with the way to get it where this environment lacks it.
BackendFactories = Mapping[str, Callable[[], Backend]]
