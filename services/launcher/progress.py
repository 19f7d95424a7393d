"""What a learner says of its progress, and who is woken by a change."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


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
    """An alarm that a learner has raised. `severity`: notice | warning | error."""

    rule: str
    scope: str = "all"
    severity: str = "warning"
    # Of the run, when it was raised.
    step: int = 0
    cause: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the learner says the run has come."""

    phase: str = ""
    step: int = 0
    total_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    alarms: tuple[Alarm, ...] = ()

    def after(self, known: "Progress") -> "Progress":
        """With the figures that only learners before this one told: one that evaluates says nothing
        of training."""
        return replace(self, metrics={**known.metrics, **self.metrics})

    def body(self) -> dict[str, Any]:
        head = {"phase": self.phase, "step": self.step, "total_steps": self.total_steps}
        return {**head, "metrics": dict(self.metrics)}
