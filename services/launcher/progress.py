"""How far a run has come and what is the matter with it, as its replicas say; and who is woken by a
change."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.launcher.state import LEARNER, Key


class Signal:
    """Wakes everybody who waits for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Take this *before* looking, then wait for it: no change is missed."""
        return self._event


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that a replica of `service` has raised. `severity`: notice | warning | error."""

    rule: str
    scope: str = "all"
    severity: str = "warning"
    # Of the run, when it was raised.
    step: int = 0
    cause: str = ""
    fix: str = ""
    service: str = LEARNER


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the learner says the run has come."""

    phase: str = ""
    step: int = 0
    total_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    # Of all services.
    alarms: tuple[Alarm, ...] = ()

    def after(self, known: "Progress") -> "Progress":
        """With the figures that only learners before this one told: one that evaluates says nothing
        of training."""
        return replace(self, metrics={**known.metrics, **self.metrics})

    def body(self) -> dict[str, Any]:
        head = {"phase": self.phase, "step": self.step, "total_steps": self.total_steps}
        return {**head, "metrics": dict(self.metrics)}


class RaisedAlarms:
    """What the replicas of a run have raised: each tells its own, with every heartbeat."""

    def __init__(self, known: Iterable[Alarm]) -> None:
        """`known` is what an earlier launcher was told. Which replica it was of shows once these
        speak for themselves: until then it is the first one's."""
        self._by_replica: dict[Key, tuple[Alarm, ...]] = {}
        for alarm in known:
            key = (alarm.service, 0)
            self._by_replica[key] = (*self._by_replica.get(key, ()), alarm)

    @property
    def all(self) -> tuple[Alarm, ...]:
        """The learner's first. Of those of one name only one: several gateways may see the same."""
        ordered = sorted(self._by_replica, key=lambda key: (key[0] != LEARNER, key))
        named: dict[tuple[str, str], Alarm] = {}
        for key in ordered:
            for alarm in self._by_replica[key]:
                named.setdefault((alarm.rule, alarm.scope), alarm)
        return tuple(named.values())

    def told(self, key: Key, alarms: Iterable[Alarm], step: int) -> None:
        """All that a replica has raised now; only the learner knows at which step of the run."""
        if key[0] == LEARNER:
            self._by_replica[key] = tuple(alarms)
            return
        known = {(a.rule, a.scope): a.step for a in self._by_replica.get(key, ())}
        self._by_replica[key] = tuple(
            replace(a, service=key[0], step=known.get((a.rule, a.scope), step)) for a in alarms
        )

    def gone(self, key: Key) -> None:
        """A replica has ended, and what it had raised with it; a learner's last words stay."""
        if key[0] != LEARNER:
            self._by_replica.pop(key, None)
