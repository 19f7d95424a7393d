"""Counters of received and lost work between two steps, for the metrics."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from flotilla_common.domain.attempts import FailureKind, Purpose
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.printable_text import first_line
from flotilla_learner.alarms.types import SpoiledGroup, Streak
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.groups.staleness import STALE

_log = get_logger(__name__)
# Attempts whose lengths are compared to detect biased dropping.
_LENGTHS = 4096
# Most distinct failure kinds of one environment, and most characters of a message.
_REASONS = 32
_WORDS_CHARACTERS = 300


@dataclass(slots=True)
class StepCounters:
    """Sums since the last `take_counters`."""

    policy_tokens: int = 0
    trajectories: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    dropped_groups: Counter[str] = field(default_factory=Counter[str])
    # Tokens of dropped groups.
    dropped_tokens: int = 0
    quarantined: int = 0
    # By environment: TRAIN tries that ended, and those without a known grade.
    tries: Counter[str] = field(default_factory=Counter[str])
    no_grade: Counter[str] = field(default_factory=Counter[str])
    # By environment: tasks that were given up.
    given_up: Counter[str] = field(default_factory=Counter[str])
    # By environment: tries that the env_gateway refused to open.
    refused: Counter[str] = field(default_factory=Counter[str])
    # By environment: message of the newest try of each kind.
    no_grade_words: dict[str, str] = field(default_factory=dict[str, str])
    refused_words: dict[str, str] = field(default_factory=dict[str, str])


class Tally:
    """Counters of the run's events; `take_counters` resets them."""

    def __init__(self) -> None:
        self.stale_lengths: deque[int] = deque(maxlen=_LENGTHS)
        self.trained_lengths: deque[int] = deque(maxlen=_LENGTHS)
        self._counters = StepCounters()
        # Tries received by the whole process; then those that earlier starts of the run received.
        self.received_in_all: Counter[str] = Counter()
        self.received_before = 0
        # Monotonic time of this process's first.
        self.first_received: float | None = None
        # By environment, since its newest graded try.
        self.streaks: dict[str, Streak] = {}
        # By environment and the failure of the attempt that spoiled it.
        self.spoiled: dict[tuple[str, str], SpoiledGroup] = {}

    def count_received(self, record: AttemptRecord, spec: GroupSpec) -> None:
        """Count a try that was journaled."""
        counters = self._counters
        counters.policy_tokens += record.policy_tokens
        counters.trajectories += 1
        self.received_in_all[spec.purpose] += 1
        if self.first_received is None:
            self.first_received = time.monotonic()
        failure = record.trajectory.failure or record.dropped
        if failure:
            counters.failures[str(failure)] += 1
        self._update_streak(spec.task.env_key, record)
        if spec.purpose is Purpose.TRAIN:
            counters.tries[spec.task.env_key] += 1
            self._count_no_grade(record, spec.task.env_key)

    def count_judged(self, record: AttemptRecord, spec: GroupSpec) -> None:
        """Count a try that was received before, once its group has a verdict."""
        if failure := record.trajectory.failure:
            self._counters.failures[str(failure)] += 1
            self._count_no_grade(record, spec.task.env_key)

    def _count_no_grade(self, record: AttemptRecord, env: str) -> None:
        if record.trajectory.failure is FailureKind.NO_GRADE:
            words = ": ".join(filter(None, _explain_failure(record.trajectory)))
            self._counters.no_grade[env] += 1
            self._counters.no_grade_words[env] = words

    def count_dropped(self, reason: str, group: ReadyGroup) -> None:
        self._counters.dropped_groups[reason] += 1
        records = (*group.graded, *group.failed)
        self._counters.dropped_tokens += sum(record.policy_tokens for record in records)
        if reason == STALE:
            self.stale_lengths.extend(record.policy_tokens for record in group.graded)

    def count_given_up(self, spec: GroupSpec) -> None:
        """Count a task that was given up: it was dropped as often as it may be requeued."""
        self._counters.quarantined += 1
        self._counters.given_up[spec.task.env_key] += 1
        _log.error("a task was given up", task=spec.task.key, env=spec.task.env_key)

    def count_refused(self, env: str, tries: int, detail: str) -> None:
        """Count a group's tries that the env_gateway refused, and keep its message."""
        self._counters.refused[env] += tries
        self._counters.refused_words[env] = first_line(detail, _WORDS_CHARACTERS)

    def count_spoiled(self, spec: GroupSpec, spoiling: Trajectory) -> None:
        """Count a group that was dropped because of one of its attempts."""
        kind, detail, task = str(spoiling.failure), spoiling.detail, spec.task
        self.spoiled[task.env_key, kind] = SpoiledGroup(f"of task {task.key!r}: {detail}")
        _log.error("a group was dropped", reason=kind, task=task.key, detail=detail)

    def count_sound(self, env: str) -> None:
        """Count a group of an environment that no attempt spoiled."""
        for key, known in self.spoiled.items():
            if key[0] == env:
                self.spoiled[key] = replace(known, groups_since=known.groups_since + 1)

    def count_trained(self, group: ReadyGroup) -> None:
        """Count a group that went into a step."""
        self.trained_lengths.extend(record.policy_tokens for record in group.graded)

    def _update_streak(self, env: str, record: AttemptRecord) -> None:
        trajectory = record.trajectory
        if trajectory.failure is None:
            self.streaks[env] = Streak(0, {})
            return
        reason, words = _explain_failure(trajectory)
        known = self.streaks.get(env, Streak(0, {}))
        reasons, newest = Counter(known.reasons), dict(known.words)
        if reason in reasons or len(reasons) < _REASONS:
            reasons[reason] += 1
            newest[reason] = words or newest.get(reason, "")
        self.streaks[env] = Streak(known.tries + 1, reasons, newest)

    def take_counters(self) -> StepCounters:
        """Return the sums so far, and reset them."""
        taken, self._counters = self._counters, StepCounters()
        return taken


def _explain_failure(trajectory: Trajectory) -> tuple[str, str]:
    """Return the kind of a try's failure, which is one of few, and the message of a verifier
    or backend."""
    words = first_line(trajectory.detail, _WORDS_CHARACTERS)
    if trajectory.no_grade:
        return f"{trajectory.failure}: {trajectory.no_grade}", words
    kind, colon, rest = words.partition(": ")
    if colon and kind.isupper() and kind.isidentifier():
        # A reason of the env_gateway's contract.
        return f"{trajectory.failure}: {kind}", rest
    return str(trajectory.failure), words
