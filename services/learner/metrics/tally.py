"""What came in and what was lost between two steps, for the metrics."""

from collections import Counter, deque
from dataclasses import dataclass, field

from services.common.log import get_logger
from services.learner.alarms.types import Streak
from services.learner.groups.batcher import ReadyGroup, Record
from services.learner.groups.types import GroupSpec, Purpose
from services.learner.types import FailureKind

_log = get_logger(__name__)
# Attempts whose lengths are compared to see whether dropping is biased.
_LENGTHS = 4096
# Kinds of failures of one environment that are told apart, and how much of each is kept.
_REASONS = 32
_REASON_CHARACTERS = 200


@dataclass(slots=True)
class Counters:
    """Sums since they were last taken."""

    policy_tokens: int = 0
    trajectories: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    dropped_groups: Counter[str] = field(default_factory=Counter[str])
    # Those of groups that were dropped.
    dropped_tokens: int = 0
    quarantined: int = 0
    # By environment: TRAIN tries that ended, and those whose grade is not known.
    tries: Counter[str] = field(default_factory=Counter[str])
    no_grade: Counter[str] = field(default_factory=Counter[str])
    # By environment: tasks that were given up.
    given_up: Counter[str] = field(default_factory=Counter[str])
    # By environment: tries that the env_gateway would not even open.
    refused: Counter[str] = field(default_factory=Counter[str])


class Tally:
    """Counts as things happen; `take` starts anew."""

    def __init__(self) -> None:
        self.stale_lengths: deque[int] = deque(maxlen=_LENGTHS)
        self.trained_lengths: deque[int] = deque(maxlen=_LENGTHS)
        self._counters = Counters()
        # Of the whole process; and how many earlier starts of the run have received.
        self.received_in_all: Counter[str] = Counter()
        self.received_before = 0
        # By environment, since its newest graded try.
        self.streaks: dict[str, Streak] = {}

    def received(self, record: Record, spec: GroupSpec) -> None:
        """A try was journaled."""
        counters = self._counters
        counters.policy_tokens += record.policy_tokens
        counters.trajectories += 1
        self.received_in_all[spec.purpose] += 1
        failure = record.trajectory.failure or record.dropped
        if failure:
            counters.failures[str(failure)] += 1
        self._streak(spec.task.env_key, record)
        if spec.purpose is Purpose.TRAIN:
            env = spec.task.env_key
            counters.tries[env] += 1
            counters.no_grade[env] += record.trajectory.failure is FailureKind.NO_GRADE

    def dropped(self, reason: str, group: ReadyGroup) -> None:
        """A group was dropped."""
        self._counters.dropped_groups[reason] += 1
        records = (*group.graded, *group.failed)
        self._counters.dropped_tokens += sum(record.policy_tokens for record in records)
        if reason == "stale":
            self.stale_lengths.extend(record.policy_tokens for record in group.graded)

    def quarantined(self, spec: GroupSpec) -> None:
        """A task was dropped as often as it may be requeued."""
        self._counters.quarantined += 1
        self._counters.given_up[spec.task.env_key] += 1
        _log.error("a task was given up", task=spec.task.key, env=spec.task.env_key)

    def refused(self, env: str, tries: int) -> None:
        """The env_gateway refused every try of a group."""
        self._counters.refused[env] += tries

    def trained(self, group: ReadyGroup) -> None:
        """A group went into a step."""
        self.trained_lengths.extend(record.policy_tokens for record in group.graded)

    def _streak(self, env: str, record: Record) -> None:
        trajectory = record.trajectory
        if trajectory.failure is None:
            self.streaks[env] = Streak(0, {})
            return
        said = trajectory.no_grade or trajectory.detail.partition("\n")[0][:_REASON_CHARACTERS]
        reason = f"{trajectory.failure}: {said}" if said else str(trajectory.failure)
        known = self.streaks.get(env, Streak(0, {}))
        reasons = Counter(known.reasons)
        if reason in reasons or len(reasons) < _REASONS:
            reasons[reason] += 1
        self.streaks[env] = Streak(known.tries + 1, reasons)

    def take(self) -> Counters:
        """The sums so far, which start from nothing again."""
        taken, self._counters = self._counters, Counters()
        return taken
