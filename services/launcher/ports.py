"""What the launcher needs from whatever runs processes, and whom it asks and tells, in its own
words."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from services.launcher.config.launcher import LauncherConfig
from services.launcher.state import Cost, Exit, Key, Outcome, Run, RunMode, Unit
from services.launcher.store.ledger import Event, StoredRun


class BackendError(Exception):
    """A replica cannot be started, now or later; the message says why."""


class CapacityError(BackendError):
    """Nobody has such a machine at present. Another attempt may find one, perhaps elsewhere."""


class SetupError(BackendError):
    """There was a machine, and it could not be made ready. Another one may do."""


class StartLostError(BackendError):
    """Somebody else ended it before it was started, or the backend broke over it: next time it may
    come true. Counts like a crash of the replica."""


class BackendUnreachable(Exception):
    """The backend cannot be asked, so nothing is known: nothing is torn down, nothing counted.

    Any method of a backend may raise it; the launcher asks again.
    """


@dataclass(frozen=True, slots=True)
class Launch:
    """One replica to start. `secrets` are for it alone and are written nowhere.

    `command` is for this machine, and so are the variables that it `inherits`. A backend of other
    machines makes its own of the rest.
    """

    run_id: str
    key: Key
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
        """Unique among all that the backend runs, and the same for every start of the replica."""
        return f"{self.run_id}/{self.key[0]}-{self.key[1]}"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a backend would use for one replica: for people, and its own task file if it has one."""

    resources: str
    task_yaml: str = ""
    # US dollars for one replica; None where nobody knows a price.
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a backend found when it was asked whether anything of a run is left."""

    gone: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Stray:
    """Something that is ours and of no active run, by its name at the backend. `run_id` is empty
    where the name does not say whose it is."""

    name: str
    run_id: str = ""
    # What it is, for people.
    detail: str = ""


class Backend(Protocol):
    """Runs replicas somewhere. All methods may be repeated; a name identifies a replica.

    Output of a replica is appended to `Launch.log`, wherever it runs.
    """

    async def offer(self, launch: Launch) -> Offer:
        """Say what starting this would use. Raises BackendError when it cannot be had."""
        ...

    async def start(self, launch: Launch) -> Unit:
        """Start a replica; may take minutes on machines that must be found first.

        Raises CapacityError, SetupError, StartLostError, BackendError. What it leaves where it
        fails or is cancelled, `undo` ends.
        """
        ...

    async def attach(self, launch: Launch, unit: Unit) -> bool:
        """Take over a replica that an earlier launcher started. False: it is gone.

        After True the unit may be waited for, drained and killed like one of our own.
        """
        ...

    async def find(self, launch: Launch) -> Unit | None:
        """The replica that a start of this has left, if any: nobody wrote down what came of it."""
        ...

    async def undo(self, launch: Launch) -> None:
        """End what a start of this has left, if anything: nobody wants it any more."""
        ...

    async def price(self, launch: Launch) -> float | None:
        """US dollars per hour of the machines that the replica has now; None where that is not
        known."""
        ...

    async def wait(self, unit: Unit) -> Exit:
        """Return once the replica *and all it started* are gone."""
        ...

    async def drain(self, unit: Unit) -> None:
        """Ask it to finish and exit, by the platform's own means if there are any."""
        ...

    async def kill(self, unit: Unit) -> None:
        """End it and all it started, now."""
        ...

    async def orphans(self, known: Collection[Unit]) -> list[Unit]:
        """What still runs of these, and of what an earlier launcher started here unrecorded."""
        ...

    async def end(self, unit: Unit, grace_s: float) -> None:
        """End an orphan: ask, wait for as long as `grace_s`, then kill."""
        ...

    async def clean(self, run_id: str) -> Evidence:
        """Free what a run that has ended left behind, then look whether anything is left."""
        ...

    async def strays(self, active: Collection[str]) -> list[Stray]:
        """What is ours and of no run in `active`. Runs may be begun, and become active, while this
        looks: whether one is active counts only after it has looked."""
        ...

    async def reap(self, active: Collection[str]) -> list[str]:
        """End the strays; say what that was. Called now and then."""
        ...


# By the name in `launcher.backend`. Called once, when the first run needs it; raises BackendError
# with the way to get it where this environment lacks it.
Backends = Mapping[str, Callable[[], Backend]]


class Registry(Protocol):
    """Where a run's replicas register, and what they need to be let in."""

    @property
    def address(self) -> str: ...

    def secrets(self, service: str) -> Mapping[str, str]:
        """What a replica of this service needs, by variable: the run's token, its part of TLS."""
        ...


class Registries(Protocol):
    """Serves a registry for each run, which only the run's own processes may call."""

    async def open(self, run_id: str, config: LauncherConfig, remembered: str) -> Registry:
        """Serve a run, where it was served before if that is remembered and still free. A run has
        the token that it had, or a new one."""
        ...

    async def close(self, run_id: str, *, forget: bool) -> None:
        """Serve it no more; with `forget` its token and certificates are gone for ever."""
        ...


class UnitPhase(StrEnum):
    """Where a replica's machine is on its way, as its watcher says."""

    SETUP = "setup"
    RUNNING = "running"
    PREEMPTED = "preempted"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class UnitReport:
    """What the watcher on a replica's machine says; `exit` once it is EXITED."""

    phase: UnitPhase
    exit: Exit | None = None
    hostname: str = ""
    restarts: int = 0


class RefusedError(Exception):
    """A run must not start; the message says what is wrong and how to mend it."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A run that is about to start, before anything costs money."""

    run: Run
    run_dir: Path
    spec_json: str
    config: LauncherConfig
    launches: tuple[Launch, ...]


class Gate(Protocol):
    """Asked in PREFLIGHT, again by a successor of a launcher that died there."""

    async def __call__(self, intent: Intent) -> Sequence[str]:
        """Let the run start, with what people should know of it. Raises RefusedError."""
        ...


class Observer(Protocol):
    """Told of everything that happens to a run, once it is committed, in order.

    At least once: what a launcher did not see through, its successor tells again. Event.number
    identifies an event of a run. `progress` events are not told.
    """

    async def __call__(self, stored: StoredRun, event: Event) -> None:
        """Deal with one event; an exception is logged, and the event counts as told."""
        ...


@dataclass(frozen=True, slots=True)
class Tick:
    """A run as it was for `passed_s` seconds, up to now; `prices` is $/h of one replica."""

    run: Run
    config: LauncherConfig
    prices: Mapping[str, float]
    cost: Cost
    passed_s: float
    # Since the run was begun.
    age_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run has cost by now; with `stop` it is drained towards that outcome."""

    cost: Cost
    stop: Outcome | None = None
    # For people, in the run's events.
    note: str = ""


class Meter(Protocol):
    """Called every minute and whenever a replica comes or goes. Pure."""

    def __call__(self, tick: Tick) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whom a launcher asks and tells. All are optional."""

    gate: Gate | None = None
    meter: Meter | None = None
    observers: tuple[Observer, ...] = ()


NO_HOOKS = Hooks()
