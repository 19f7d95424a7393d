"""The gateway's messages become the rollout's own values; unset fields are absent."""

import math

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from services.rollout.api.codec import tool_result_from_pb


@pytest.mark.parametrize(
    ("sent", "read"),
    [({"reward": 0.25}, 0.25), ({"reward": 0.0}, 0.0), ({}, None), ({"reward": math.nan}, None)],
)
def test_the_reward_of_a_step_is_kept_where_there_is_one(
    sent: dict[str, float], read: float | None
) -> None:
    response = pb.CallToolResponse(outcome=pb.TOOL_OUTCOME_OK, **sent)  # pyright: ignore[reportArgumentType]
    assert tool_result_from_pb(response, ["x"]).reward == read
