"""Reports of failed tries, in the words of the service that failed them."""

from flotilla_common.domain.attempts import AttemptKey, FailureKind, Purpose
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.groups.counters import Tally
from flotilla_learner.groups.graded_attempts import AttemptRecord
from flotilla_learner.sampling.tasks import Task

SPEC = GroupSpec("g", 0, Task("t", "shop", "{}"), Purpose.TRAIN, 2, 1.0)


def ended(kind: FailureKind | None, detail: str = "", no_grade: str = "") -> AttemptRecord:
    trajectory = Trajectory(
        AttemptKey("g", 0, 0),
        "",
        (),
        b"",
        reward=None if kind else 1.0,
        failure=kind,
        no_grade=no_grade,
        detail=detail,
    )
    return AttemptRecord(trajectory, 0, 0, None, None)


def test_tries_without_a_grade_are_counted_by_reason_and_quote_the_newest_verifier() -> None:
    tally = Tally()
    for number in range(3):
        words = f"KeyError: {number}\x1b[31m (line 3 of the verifier)\nmore"
        tally.count_received(ended(FailureKind.NO_GRADE, words, "execution_failed"), SPEC)
    streak = tally.streaks["shop"]
    assert streak.reasons == {"no_grade: execution_failed": 3}
    newest = "KeyError: 2 (line 3 of the verifier)"
    assert streak.words == {"no_grade: execution_failed": newest}
    assert tally.take_counters().no_grade_words == {"shop": f"no_grade: execution_failed: {newest}"}
    tally.count_received(ended(None), SPEC)
    assert tally.streaks["shop"].tries == 0


def test_a_backends_own_words_follow_the_gateways_reason() -> None:
    tally = Tally()
    tally.count_received(ended(FailureKind.ENV_LOST, "UNAVAILABLE: connection refused: 1"), SPEC)
    tally.count_received(ended(FailureKind.ENV_LOST, "connection reset"), SPEC)
    tally.count_refused("shop", 2, "BAD_TASK: no such seed\nTraceback")
    assert tally.streaks["shop"].words == {
        "env_lost: UNAVAILABLE": "connection refused: 1",
        "env_lost": "connection reset",
    }
    assert tally.take_counters().refused_words == {"shop": "BAD_TASK: no such seed"}
