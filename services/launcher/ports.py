"""The launcher's ports: the backends that run processes, and those whom it asks and informs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.launcher.backends.ports import LaunchSpec
from services.launcher.config.launcher import LauncherConfig
from services.launcher.run_plan import RunPlan
from services.launcher.state import Cost, Outcome, Run
from services.launcher.store.ledger import RunEvent, StoredRun


class Registry(Protocol):
    """Registry of a run: the address at which its replicas register, and the secrets that
    admit them."""

    @property
    def address(self) -> str: ...

    def secrets_for(self, service: str) -> Mapping[str, str]:
        """Return the secrets that a replica of this service needs, by variable: the run's
        token, its part of TLS."""
        ...


class RegistryHost(Protocol):
    """Host that serves a registry for each run, which only the run's own processes may call."""

    async def open_registry(self, run_id: str, config: LauncherConfig, remembered: str) -> Registry:
        """Serve a run, at its remembered address if that is still free. A run keeps the
        token that it had, or gets a new one."""
        ...

    async def close(self, run_id: str, *, forget: bool) -> None:
        """Stop serving it; with `forget` its token and certificates are gone for ever."""
        ...


class RunRefusedError(Exception):
    """A run must not start. The message says what is wrong and how to fix it."""


@dataclass(frozen=True, slots=True)
class PendingRun:
    """Run that is about to start, before anything costs money."""

    run: Run
    run_dir: Path
    spec_json: str
    config: LauncherConfig
    launches: tuple[LaunchSpec, ...]


class StartGate(Protocol):
    """Check that is called in PREFLIGHT, and again by a successor of a launcher that died
    there."""

    async def __call__(self, intent: PendingRun) -> Sequence[str]:
        """Let the run start and return what people should know of it. Raises
        RunRefusedError."""
        ...


class RunObserver(Protocol):
    """Observer of everything that happens to a run, once it is committed, in order.

    Delivery is at least once: events that a launcher did not see through are repeated by its
    successor. RunEvent.number identifies an event of a run. `progress` events are not
    delivered."""

    async def __call__(self, stored: StoredRun, event: RunEvent) -> None:
        """Handle one event. An exception is logged, and the event counts as delivered."""
        ...


@dataclass(frozen=True, slots=True)
class MeterTick:
    """State of a run over the last `passed_s` seconds; `prices` is $/h of one replica."""

    run: Run
    config: LauncherConfig
    prices: Mapping[str, float]
    cost: Cost
    passed_s: float
    # Since the run was begun.
    age_s: float


@dataclass(frozen=True, slots=True)
class MeterVerdict:
    """Cost of a run so far; with `stop` the run is drained towards that outcome."""

    cost: Cost
    stop: Outcome | None = None
    # For people, in the run's events.
    note: str = ""


class CostMeter(Protocol):
    """Cost meter, called every minute and whenever a replica comes or goes. Pure."""

    def __call__(self, tick: MeterTick) -> MeterVerdict: ...


class ModelPin(Protocol):
    """Resolver of a spec's model, called once before a run is begun."""

    async def __call__(self, plan: RunPlan) -> str | None:
        """Return the commit that the run is to keep; None where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class LauncherHooks:
    """Pin, gate, meter and observers of a launcher. All are optional."""

    pin: ModelPin | None = None
    gate: StartGate | None = None
    meter: CostMeter | None = None
    observers: tuple[RunObserver, ...] = ()


NO_HOOKS = LauncherHooks()
