"""Port of the backends: a replica to start, its end, and the ways in which a start may fail."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla_launcher.agent_protocol import UnitReport
from flotilla_launcher.run_spec import RunSpec, read_spec
from flotilla_launcher.state import ExitStatus, ReplicaKey, RunMode, Unit

# The spec of a process that is started by itself, without a run.
_NO_SPEC = read_spec({"name": "none", "policy": {"model": "none", "max_model_len": 1}})


class BackendError(Exception):
    """A replica cannot be started, now or later. The message gives the reason."""


class CapacityError(BackendError):
    """No such machine is available now. Another attempt may find one, perhaps elsewhere."""


class SetupError(BackendError):
    """The machine was found but could not be made ready. Another one may work."""


class StartLostError(BackendError):
    """Another party ended the replica before it started, or the backend failed during the start.
    The next start may succeed. It counts as a crash of the replica."""


class BackendUnreachable(Exception):
    """The backend does not answer, so its state is unknown: the launcher tears nothing down, counts
    no failure, and retries. Any method of a backend may raise it."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Specification of one replica to start. `secrets` are for it alone and are never written.

    `command` and the variables that it `inherits` are for this machine. A backend of other
    machines builds its own from the rest."""

    run_id: str
    key: ReplicaKey
    command: tuple[str, ...]
    secrets: Mapping[str, str]
    log: Path
    gpus: int = 0
    # Number of the request for a machine, from 1: each attempt may go to the next candidate.
    attempt: int = 1
    mode: RunMode = RunMode.TRAIN
    # Listen address (host:port) of the run's registry.
    registry: str = ""
    spec: RunSpec = _NO_SPEC
    inherits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the replica, unique among all that the backend runs and the same for every
        start."""
        return f"{self.run_id}/{self.label}"

    @property
    def label(self) -> str:
        return f"{self.key[0]}-{self.key[1]}"


@dataclass(frozen=True, slots=True)
class ResourceOffer:
    """Resources that a backend would use for one replica, as text, with the backend's task file if
    it has one."""

    resources: str
    task_yaml: str = ""
    # US dollars for one replica; None if unknown.
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """Claim of a run to `count` devices of the launcher's machine, for as long as it lasts. Claims
    that wait are granted by priority, the highest first, then by the time they were submitted."""

    run_id: str
    count: int
    priority: int = 0
    submitted: float = 0.0
    waits: bool = True


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Place of a claim among those that wait, from 1, and what it waits for."""

    place: int
    reason: str


@dataclass(frozen=True, slots=True)
class CleanupEvidence:
    """Result of a check whether anything of a run is left at a backend."""

    gone: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class OrphanResource:
    """Resource of this launcher that belongs to no active run, by its name at the backend.
    `run_id` is empty if the name does not identify the run."""

    name: str
    run_id: str = ""
    # Kind and state, as text.
    detail: str = ""


class Backend(ABC):
    """Backend that runs replicas somewhere. All methods may be repeated; a name identifies a
    replica. The output of a replica is appended to `LaunchSpec.log`, wherever it runs.

    A backend implements the abstract methods; the others are derived from them. It overrides those
    if it must wait for pending requests, or holds resources other than replicas."""

    @abstractmethod
    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        """Return the resources that starting this would use. Raises BackendError if they are
        unavailable."""

    @abstractmethod
    async def start_replica(self, launch: LaunchSpec) -> Unit:
        """Start a replica; may take minutes on machines that must be found first.

        Raises CapacityError, SetupError, StartLostError, BackendError. `undo_start` ends the
        leftovers of a failed or cancelled start."""

    @abstractmethod
    async def list_units(self, known: Collection[Unit] = ()) -> list[Unit]:
        """List the running units of this launcher's folder, recorded or not; a unit of `known`
        counts while any of its children runs."""

    @abstractmethod
    async def wait_for_exit(self, unit: Unit) -> ExitStatus:
        """Return once the replica *and all its children* are gone."""

    def note_report(self, unit: Unit, node: int, report: UnitReport) -> None:
        """Take note of a report from the watcher on one of the unit's machines. While they report,
        a backend need not ask a cloud about them."""
        return None

    @abstractmethod
    async def drain_replica(self, unit: Unit) -> None:
        """Request the replica to finish and exit, by the platform's own means if there are any."""

    @abstractmethod
    async def kill_replica(self, unit: Unit) -> None:
        """End the replica and all its children now."""

    async def claim_devices(self, claim: DeviceClaim) -> QueuePlace | None:
        """Reserve devices of this machine for a run; None once it holds them. Repeated while the
        run waits. Raises BackendError if it never can."""
        return None

    async def release_devices(self, run_id: str, label: str = "") -> None:
        """Free the devices of one replica that is not wanted any more, or all of a run."""
        return None

    async def price_per_hour(self, launch: LaunchSpec) -> float | None:
        """Return the price of the replica's present machines in US dollars per hour; None if
        unknown."""
        return None

    async def attach_replica(self, launch: LaunchSpec, unit: Unit) -> bool:
        """Take over a replica that an earlier launcher started; return False if it is gone.

        After True the unit can be waited for, drained and killed like any other."""
        return unit in await self.list_units([unit])

    async def find_replica(self, launch: LaunchSpec) -> Unit | None:
        """Return the replica that a start with an unrecorded result has left, if any."""
        units = await self.list_units()
        return next((unit for unit in units if unit.replica_name == launch.name), None)

    async def undo_start(self, launch: LaunchSpec) -> None:
        """End what an unwanted start has left, if anything."""
        unit = await self.find_replica(launch)
        if unit is not None and await self.attach_replica(launch, unit):
            await self.kill_replica(unit)
            await self.wait_for_exit(unit)

    async def end_orphan(self, unit: Unit, grace_s: float) -> None:
        """Drain a unit that this launcher did not start; kill it after `grace_s`."""
        await self.drain_replica(unit)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.wait_for_exit(unit)
                return
        await self.kill_replica(unit)

    async def clean_run(self, run_id: str) -> CleanupEvidence:
        """Free what an ended run left behind, then check whether anything is left."""
        await self._kill_units(lambda unit: unit.run_id == run_id)
        left = sorted(unit.name for unit in await self.list_units() if unit.run_id == run_id)
        return CleanupEvidence(not left, ", ".join(left))

    async def list_orphan_resources(self, active: Collection[str]) -> list[OrphanResource]:
        """List the resources of this launcher that belong to no run in `active`.

        Runs may become active during the call, so membership is tested after the look."""
        found = [
            OrphanResource(unit.name, unit.run_id, f"process {unit.pid}" if unit.pid else "")
            for unit in await self.list_units()
        ]
        return [orphan for orphan in found if orphan.run_id not in active]

    async def reap_orphans(self, active: Collection[str]) -> list[str]:
        """End these resources and return their names. Called periodically."""
        return await self._kill_units(lambda unit: unit.run_id not in active)

    async def _kill_units(self, chosen: Callable[[Unit], bool]) -> list[str]:
        units = [unit for unit in await self.list_units() if chosen(unit)]
        await asyncio.gather(*(self.kill_replica(unit) for unit in units))
        return [unit.name for unit in units]


# By the name in `launcher.backend`. Called when the first run needs the backend; raises
# BackendError with the way to install it if this environment lacks it.
BackendFactories = Mapping[str, Callable[[], Backend]]
