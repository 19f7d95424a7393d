"""Status of the learner, for people and for the launcher."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flotilla_common.domain.policy import PolicyId


class Phase(StrEnum):
    """The stages of a run, as GetStatus names them."""

    LOADING = "loading"
    EVALUATING = "evaluating"
    IMITATING = "imitating"
    SAMPLING = "sampling"
    TRAINING = "training"
    PUBLISHING = "publishing"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class LearnerStatus:
    """Newest state of a run."""

    total_steps: int
    phase: Phase = Phase.LOADING
    step: int = 0
    policy: PolicyId | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    # URL of the run's page at a tracker; empty without one.
    tracker_url: str = ""
    # Raised alarms, as metrics.
    flags: Callable[[], Mapping[str, float]] = dict

    @property
    def shown_metrics(self) -> dict[str, float]:
        """Metrics and raised alarms."""
        return {**self.metrics, **self.flags()}

    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase

    def drop_metrics(self, prefix: str) -> None:
        """Forget what is measured no more: the metrics with this prefix."""
        self.metrics = {
            name: value for name, value in self.metrics.items() if not name.startswith(prefix)
        }

    def update_metrics(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        self.metrics.update(metrics)
        if step is not None:
            self.step = step
