"""What came in and what was lost between two steps, for the metrics."""

from collections import Counter, deque
from dataclasses import dataclass, field

from services.learner.batcher import ReadyGroup, Record
from services.learner.group_types import Purpose
from services.learner.types import FailureKind

# Attempts whose lengths are compared to see whether dropping is biased.
_LENGTHS = 4096


@dataclass(slots=True)
class Counters:
    """Sums since they were last taken."""

    policy_tokens: int = 0
    trajectories: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    dropped_groups: Counter[str] = field(default_factory=Counter[str])
    # By environment: TRAIN tries that ended, and those whose grade is not known.
    tries: Counter[str] = field(default_factory=Counter[str])
    no_grade: Counter[str] = field(default_factory=Counter[str])


class Tally:
    """Counts as things happen; `take` starts anew."""

    def __init__(self) -> None:
        self.quarantined: list[str] = []
        self.stale_lengths: deque[int] = deque(maxlen=_LENGTHS)
        self.trained_lengths: deque[int] = deque(maxlen=_LENGTHS)
        self._counters = Counters()

    def received(self, record: Record, purpose: Purpose) -> None:
        """A try was journaled."""
        counters = self._counters
        counters.policy_tokens += record.policy_tokens
        counters.trajectories += 1
        failure = record.trajectory.failure or record.dropped
        if failure:
            counters.failures[str(failure)] += 1
        if purpose is Purpose.TRAIN:
            env = record.trajectory.facts.env_key
            counters.tries[env] += 1
            counters.no_grade[env] += record.trajectory.failure is FailureKind.NO_GRADE

    def dropped(self, reason: str, group: ReadyGroup) -> None:
        """A group was dropped."""
        self._counters.dropped_groups[reason] += 1
        if reason == "stale":
            self.stale_lengths.extend(record.policy_tokens for record in group.graded)

    def trained(self, group: ReadyGroup) -> None:
        """A group went into a step."""
        self.trained_lengths.extend(record.policy_tokens for record in group.graded)

    def take(self) -> Counters:
        """The sums so far, which start from nothing again."""
        taken, self._counters = self._counters, Counters()
        return taken
