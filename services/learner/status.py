"""What the learner is doing, for people and for the launcher."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.learner.types import PolicyId


class Phase(StrEnum):
    """The stages of a run, as GetStatus names them."""

    LOADING = "loading"
    EVALUATING = "evaluating"
    SAMPLING = "sampling"
    TRAINING = "training"
    PUBLISHING = "publishing"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Status:
    """The newest of everything; `on_change` is called after each update."""

    total_steps: int
    phase: Phase = Phase.LOADING
    step: int = 0
    policy: PolicyId | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    on_change: Callable[["Status"], None] | None = None

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self._changed()

    def update(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        self.metrics.update(metrics)
        if step is not None:
            self.step = step
        self._changed()

    def _changed(self) -> None:
        if self.on_change:
            self.on_change(self)
