"""The launcher's ports: registries, and the hooks that it calls for a run."""

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
        """Return the secrets of a replica of this service by variable name: the run's token
        and the service's TLS material."""
        ...


class RegistryHost(Protocol):
    """Host that serves one registry per run. Only the run's own processes may call it."""

    async def open_registry(self, run_id: str, config: LauncherConfig, remembered: str) -> Registry:
        """Serve a run, at its remembered address if that is still free. A run keeps its
        token; a run without one gets a new one."""
        ...

    async def close(self, run_id: str, *, forget: bool) -> None:
        """Stop serving it; with `forget`, delete its token and certificates."""
        ...


class RunRefusedError(Exception):
    """A run must not start. The message states the cause and the fix."""


@dataclass(frozen=True, slots=True)
class PendingRun:
    """Run that is about to start, before it costs money."""

    run: Run
    run_dir: Path
    spec_json: str
    config: LauncherConfig
    launches: tuple[LaunchSpec, ...]


class StartGate(Protocol):
    """Check called in PREFLIGHT. If the launcher dies there, its successor calls it again."""

    async def __call__(self, intent: PendingRun) -> Sequence[str]:
        """Admit the run and return notes for people. Raises RunRefusedError."""
        ...


class RunObserver(Protocol):
    """Observer of a run's committed events, in order.

    Delivery is at least once: a successor repeats events that a dead launcher may not have
    delivered. RunEvent.number identifies an event of a run. `progress` events are not
    delivered."""

    async def __call__(self, stored: StoredRun, event: RunEvent) -> None:
        """Handle one event. If it raises, the error is logged and the event counts as delivered."""
        ...


@dataclass(frozen=True, slots=True)
class MeterTick:
    """State of a run over the last `passed_s` seconds; `prices` is $/h of one replica."""

    run: Run
    config: LauncherConfig
    prices: Mapping[str, float]
    cost: Cost
    passed_s: float
    # Seconds since the run began.
    age_s: float


@dataclass(frozen=True, slots=True)
class MeterVerdict:
    """Cost of a run so far. If `stop` is set, the run is drained towards that outcome."""

    cost: Cost
    stop: Outcome | None = None
    # Message for people, recorded in the run's events.
    note: str = ""


class CostMeter(Protocol):
    """Cost meter, called every minute and whenever a replica starts or ends. Pure."""

    def __call__(self, tick: MeterTick) -> MeterVerdict: ...


class ModelPin(Protocol):
    """Resolver of a spec's model revision, called once before a run begins."""

    async def __call__(self, plan: RunPlan) -> str | None:
        """Return the commit to pin for the run; None if the model has no commit."""
        ...


@dataclass(frozen=True, slots=True)
class LauncherHooks:
    """Pin, gate, meter and observers of a launcher. All are optional."""

    pin: ModelPin | None = None
    gate: StartGate | None = None
    meter: CostMeter | None = None
    observers: tuple[RunObserver, ...] = ()


NO_HOOKS = LauncherHooks()
