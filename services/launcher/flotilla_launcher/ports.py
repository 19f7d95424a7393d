"""The launcher's ports: registries, and the hooks that it calls for a run."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.run_spec import RunSpec
from flotilla_launcher.state import Cost, Outcome, Run
from flotilla_launcher.store.ledger import RunEvent, StoredRun


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
    spec: RunSpec


# Admits the run in PREFLIGHT, and returns notes for people; raises RunRefusedError. If the launcher
# dies there, its successor calls it again.
StartGate = Callable[[PendingRun], Awaitable[Sequence[str]]]

# Handles a run's committed events, in order. Delivery is at least once: a successor repeats events
# that a dead launcher may not have delivered. RunEvent.number identifies an event of a run.
# `progress` events are not delivered. If it raises, the error is logged and the event counts as
# delivered.
RunObserver = Callable[[StoredRun, RunEvent], Awaitable[None]]


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


# Called every minute and whenever a replica starts or ends. Pure.
CostMeter = Callable[[MeterTick], MeterVerdict]

# Returns the commit of the model to pin for a run; None if the model has no commit. Called once
# before the run begins and has a folder. Raises ConfigError if what the run reads is missing.
ModelPin = Callable[[RunSpec], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class LauncherHooks:
    """Pin, gate, meter and observers of a launcher. All are optional."""

    pin: ModelPin | None = None
    gate: StartGate | None = None
    meter: CostMeter | None = None
    observers: tuple[RunObserver, ...] = ()


NO_HOOKS = LauncherHooks()
