"""The gateway's messages become the rollout's own values; unset fields are absent."""

import math

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_env_gateway.api.codec import encode_grade
from flotilla_rollout.api.codec import grade_from_pb, tool_result_from_pb


@pytest.mark.parametrize(
    ("sent", "read"),
    [({"reward": 0.25}, 0.25), ({"reward": 0.0}, 0.0), ({}, None), ({"reward": math.nan}, None)],
)
def test_the_reward_of_a_step_is_kept_where_there_is_one(
    sent: dict[str, float], read: float | None
) -> None:
    response = pb.CallToolResponse(outcome=pb.TOOL_OUTCOME_OK, **sent)  # pyright: ignore[reportArgumentType]
    assert tool_result_from_pb(response, ["x"]).reward == read


def test_named_rewards_arrive_with_the_reward() -> None:
    named = {"style": 0.5, "correct": -1.0}
    grade = Grade(reward=1.0, partial_reward=0.5, named_rewards=named, checks_passed=("a",))
    assert grade_from_pb(encode_grade(grade)) == grade
    assert grade_from_pb(encode_grade(Grade(reward=0.0))).named_rewards == {}
    unknown = Grade(reason=NoGradeReason.TIMEOUT, named_rewards=named)
    assert grade_from_pb(encode_grade(unknown)).named_rewards == {}


def test_a_grade_that_a_judge_will_give_is_neither_known_nor_missing() -> None:
    grade = grade_from_pb(encode_grade(Grade(to_be_judged=True, attempts=0)))
    assert grade.to_be_judged
    assert grade.reward is None
    assert grade.reason is None
