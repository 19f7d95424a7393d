"""What a learner says of its progress, and who is woken by a change."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Progress:
    """How far the learner says the run has come."""

    phase: str = ""
    step: int = 0
    total_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def body(self) -> dict[str, Any]:
        head = {"phase": self.phase, "step": self.step, "total_steps": self.total_steps}
        return {**head, "metrics": dict(self.metrics)}


def raised(metrics: Mapping[str, float]) -> list[str]:
    """The alarms that are raised, out of `alarms/{rule}/{scope}`."""
    parts = [name.split("/") for name in sorted(metrics)]
    found = [part[1:] for part in parts if part[0] == "alarms" and len(part) == 3]
    return [rule if scope == "all" else f"{rule} of {scope}" for rule, scope in found]
