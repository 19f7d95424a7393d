"""Staleness: the permitted age of the weights behind a group (I7), and groups beyond it."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

# Reason for dropping a group that no step may train on any more.
STALE = "stale"


class SampledGroup(Protocol):
    """A group with attempts by known policy versions."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that wrote any of it; None if none has yet."""
        ...


G = TypeVar("G", bound=SampledGroup)


def oldest_allowed(trainer_version: int, max_staleness: int) -> int:
    """Return the oldest version that a step from `trainer_version` on may train on."""
    return trainer_version - max_staleness


def is_stale(group: SampledGroup, oldest_allowed: int) -> bool:
    """Return True if a version older than `oldest_allowed` wrote any of a group."""
    return group.oldest_version is not None and group.oldest_version < oldest_allowed


def keep_fresh(groups: Iterable[G], oldest_allowed: int) -> list[G]:
    """Return the groups that are not stale, in order."""
    return [group for group in groups if not is_stale(group, oldest_allowed)]
