"""Rewards of any result."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_common.domain.attempts import NoGradeReason
from flotilla_env_gateway.grading.verdict import judge_execution
from flotilla_env_gateway.ports import Execution

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON)
def test_a_reward_is_known_exactly_when_the_result_is_a_number_within_bounds(result: Any) -> None:
    grade = judge_execution(Execution(result=result), attempts=1)
    assert (grade.reward is None) == (grade.reason is not None)
    assert grade.reward is None or abs(grade.reward) <= 1e6
    if isinstance(result, str | list | dict) or result is None:
        assert grade.reward is None


@pytest.mark.parametrize(
    "result", [1e308, -1e308, 1.0000001e6, 10**400, -(2**63), float("nan"), float("-inf")]
)
def test_a_reward_that_would_overflow_a_mean_is_no_grade_and_is_reported(result: float) -> None:
    grade = judge_execution(Execution(result=result), attempts=1)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.EXECUTION_FAILED)
    assert "a reward is a number from -1e+06 to 1e+06, and 1 is a pass" in grade.detail
    for within in (1e6, -1e6, 0, True, 0.5):
        assert judge_execution(Execution(result=within), attempts=1).reward == within
