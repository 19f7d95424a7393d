"""Enums of the domain and their twins in the contracts, matched by name."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from google.protobuf.descriptor import EnumDescriptor

from flotilla.env_gateway.v1 import episode_service_pb2
from flotilla.learner.v1 import group_service_pb2, trajectory_pb2
from services.common.domain.attempts import (
    FailureKind,
    NoGradeReason,
    Purpose,
    StopReason,
    ToolOutcome,
)
from services.common.domain.trajectory import Author

E = TypeVar("E", bound=StrEnum)
V = TypeVar("V", bound=int, covariant=True)

_UNSPECIFIED = "UNSPECIFIED"


class EnumWrapper(Protocol[V]):
    """An enum as protobuf generates it."""

    @property
    def DESCRIPTOR(self) -> EnumDescriptor: ...

    def Value(self, name: str) -> V: ...


class EnumCodec(Generic[E, V]):
    """Codec of one enum. A member without a twin is an error at import."""

    def __init__(self, members: type[E], twins: EnumWrapper[V]) -> None:
        prefix = twins.DESCRIPTOR.values_by_number[0].name.removesuffix(_UNSPECIFIED)
        self._twins = {member: twins.Value(f"{prefix}{member.name}") for member in members}
        self._members = {int(twin): member for member, twin in self._twins.items()}

    def encode(self, member: E) -> V:
        return self._twins[member]

    def decode(self, twin: int) -> E:
        """Return the member. Raises ValueError for UNSPECIFIED and what this code does not know."""
        member = self.find_member(twin)
        if member is None:
            raise ValueError(f"{twin} is none of {', '.join(self._twins)}")
        return member

    def find_member(self, twin: int) -> E | None:
        return self._members.get(twin)

    def find_members(self, twins: Iterable[int]) -> list[E | None]:
        return list(map(self._members.get, twins))


AUTHORS = EnumCodec(Author, trajectory_pb2.Author)
STOP_REASONS = EnumCodec(StopReason, trajectory_pb2.StopReason)
FAILURE_KINDS = EnumCodec(FailureKind, trajectory_pb2.FailureKind)
PURPOSES = EnumCodec(Purpose, group_service_pb2.Purpose)
TOOL_OUTCOMES = EnumCodec(ToolOutcome, episode_service_pb2.ToolOutcome)
NO_GRADE_REASONS = EnumCodec(NoGradeReason, episode_service_pb2.NoGradeReason)
