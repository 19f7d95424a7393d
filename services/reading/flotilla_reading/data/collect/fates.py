"""What becomes of a task, by the tries at it. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from flotilla_common.domain.pass_rates import PASS_REWARD


class Fate(StrEnum):
    """What becomes of a task; all but the first are reasons not to keep it."""

    KEPT = "kept"
    UNSOLVED = "unsolved"
    TOO_HARD = "too_hard"
    TOO_EASY = "too_easy"
    NOT_REPLAYED = "not_replayed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Replay:
    """The grade of a try's calls on a fresh instance: a reward, or the reason for `no_grade`."""

    reward: float | None
    no_grade: str = ""

    @property
    def passed(self) -> bool:
        return self.reward is not None and self.reward >= PASS_REWARD


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an ended try went. It has a reward or the reason for `no_grade`; and a replay, if it
    passed and was replayed."""

    reward: float | None
    no_grade: str = ""
    replay: Replay | None = None

    @property
    def passed(self) -> bool:
        return self.reward is not None and self.reward >= PASS_REWARD


@dataclass(frozen=True, slots=True)
class Rules:
    """A task is judged by at least `min_graded` graded tries, and kept if `least` <= the share that
    passed <= `most`."""

    min_graded: int
    least: Fraction
    most: Fraction


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of a task, and from what it follows."""

    fate: Fate
    reason: str
    graded: int
    passed: int


def judge(outcomes: Sequence[Outcome], missing: int, rules: Rules) -> Verdict:
    """Judge a task by the ended tries at it; `missing` are to come. A try without a grade says
    nothing about the task: it is in no rate, and leaves the task undecided rather than unsolved."""
    graded = [each for each in outcomes if each.reward is not None]
    passed = [each for each in graded if each.passed]
    fate, reason = _judge(outcomes, graded, passed, missing, rules)
    return Verdict(fate, reason, len(graded), len(passed))


def needs_replay(outcomes: Sequence[Outcome], missing: int, rules: Rules) -> bool:
    """Return whether replays decide about a task."""
    verdict = judge([Outcome(each.reward, each.no_grade) for each in outcomes], missing, rules)
    return verdict.fate is Fate.UNDECIDED and verdict.reason == _NOT_REPLAYED


_NOT_REPLAYED = "no try that passed was replayed yet"


def _judge(
    outcomes: Sequence[Outcome],
    graded: Sequence[Outcome],
    passed: Sequence[Outcome],
    missing: int,
    rules: Rules,
) -> tuple[Fate, str]:
    if missing:
        return Fate.UNDECIDED, f"{len(outcomes)} of {len(outcomes) + missing} tries have ended"
    if len(graded) < rules.min_graded:
        reasons = Counter(each.no_grade for each in outcomes if each.reward is None)
        why = f"; no grade: {reasons.most_common(1)[0][0]}" if reasons else ""
        return (
            Fate.UNDECIDED,
            f"only {len(graded)} of the {rules.min_graded} graded tries needed{why}",
        )
    rate = f"{len(passed)} of {len(graded)} passed"
    if not passed:
        return Fate.UNSOLVED, rate
    if len(passed) < rules.least * len(graded):
        return Fate.TOO_HARD, rate
    if len(passed) > rules.most * len(graded):
        return Fate.TOO_EASY, rate
    return _judge_replays([each.replay for each in passed if each.replay], rate)


def _judge_replays(replays: Sequence[Replay], rate: str) -> tuple[Fate, str]:
    if any(replay.passed for replay in replays):
        return Fate.KEPT, rate
    if not replays:
        return Fate.UNDECIDED, _NOT_REPLAYED
    unknown = next((replay for replay in replays if replay.reward is None), None)
    if unknown is not None:
        return Fate.UNDECIDED, f"{rate}, but the replay has no grade: {unknown.no_grade}"
    return Fate.NOT_REPLAYED, f"{rate}, but no replay on a fresh instance"
