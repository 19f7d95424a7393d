"""What becomes of a task, by the tries at it."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_reading.data.collect.fates import Fate, Outcome, Replay, Rules, judge, needs_replay

RULES = Rules(2, Fraction(1, 4), Fraction(9, 10))
PASS, FAIL, UNKNOWN = Outcome(1.0), Outcome(0.0), Outcome(None, "verifier_error")
REPLAYED = Outcome(1.0, replay=Replay(1.0))
OUTCOMES = st.lists(st.sampled_from([PASS, FAIL, UNKNOWN, REPLAYED]), max_size=12)


@pytest.mark.parametrize(
    ("outcomes", "missing", "fate"),
    [
        ([REPLAYED, FAIL], 0, Fate.KEPT),
        ([REPLAYED, FAIL], 1, Fate.UNDECIDED),
        ([PASS, FAIL], 0, Fate.UNDECIDED),
        ([REPLAYED, UNKNOWN, UNKNOWN], 0, Fate.UNDECIDED),
        ([FAIL, UNKNOWN], 0, Fate.UNDECIDED),
        ([FAIL, FAIL, UNKNOWN], 0, Fate.UNSOLVED),
        # A reward of less than 1 is no pass.
        ([Outcome(0.9), Outcome(0.9)], 0, Fate.UNSOLVED),
        ([REPLAYED, REPLAYED], 0, Fate.TOO_EASY),
        ([REPLAYED] + [FAIL] * 3, 0, Fate.KEPT),
        ([REPLAYED] + [FAIL] * 4, 0, Fate.TOO_HARD),
        ([Outcome(1.0, replay=Replay(0.0)), FAIL], 0, Fate.NOT_REPLAYED),
        ([Outcome(1.0, replay=Replay(None, "lost")), FAIL], 0, Fate.UNDECIDED),
        ([Outcome(1.0, replay=Replay(0.0)), REPLAYED, FAIL], 0, Fate.KEPT),
    ],
)
def test_a_task_has_the_fate_that_its_tries_show(
    outcomes: list[Outcome], missing: int, fate: Fate
) -> None:
    assert judge(outcomes, missing, RULES).fate is fate


@given(OUTCOMES, st.integers(0, 5))
def test_tries_without_a_grade_change_no_rate_and_never_make_a_task_unsolvable(
    outcomes: list[Outcome], more: int
) -> None:
    before = judge(outcomes, 0, RULES)
    after = judge([*outcomes, *[UNKNOWN] * more], 0, RULES)
    assert (after.fate, after.graded, after.passed) == (before.fate, before.graded, before.passed)


@given(OUTCOMES)
def test_replays_are_made_only_where_they_decide(outcomes: list[Outcome]) -> None:
    plain = [Outcome(each.reward, each.no_grade) for each in outcomes]
    fates = {
        judge([Outcome(o.reward, o.no_grade, replay) for o in plain], 0, RULES).fate
        for replay in (Replay(1.0), Replay(0.0))
    }
    assert needs_replay(outcomes, 0, RULES) is (len(fates) == 2)
    assert not needs_replay(outcomes, 1, RULES)
