"""The domain and the contracts name the same members."""

import pytest
from google.protobuf.descriptor import EnumDescriptor

from flotilla.env_gateway.v1 import episode_service_pb2
from flotilla.learner.v1 import group_service_pb2, trajectory_pb2
from flotilla_common.domain import attempts
from flotilla_common.domain.token_authors import Author
from flotilla_common.wire.enums import STOP_REASONS, EnumCodec

TWINS = [
    (Author, trajectory_pb2.Author.DESCRIPTOR),
    (attempts.StopReason, trajectory_pb2.StopReason.DESCRIPTOR),
    (attempts.FailureKind, trajectory_pb2.FailureKind.DESCRIPTOR),
    (attempts.NoGradeReason, trajectory_pb2.NoGradeReason.DESCRIPTOR),
    (attempts.NoGradeReason, episode_service_pb2.NoGradeReason.DESCRIPTOR),
    (attempts.ToolOutcome, episode_service_pb2.ToolOutcome.DESCRIPTOR),
    (attempts.Purpose, group_service_pb2.Purpose.DESCRIPTOR),
]


@pytest.mark.parametrize(("members", "twin"), TWINS)
def test_every_member_of_a_contract_has_a_twin_in_the_domain(
    members: type[attempts.StopReason], twin: EnumDescriptor
) -> None:
    prefix = twin.values_by_number[0].name.removesuffix("UNSPECIFIED")
    message = {value.name.removeprefix(prefix) for value in twin.values} - {"UNSPECIFIED"}
    assert {member.name for member in members} == message
    assert all(member.value == member.name.lower() for member in members)


def test_a_member_without_a_twin_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="AUTHOR_DONE"):
        EnumCodec(attempts.StopReason, trajectory_pb2.Author)


def test_what_is_not_known_is_refused_by_name() -> None:
    assert STOP_REASONS.find_member(0) is STOP_REASONS.find_member(99) is None
    with pytest.raises(ValueError, match="99 is none of done, max_turns"):
        STOP_REASONS.decode(99)
