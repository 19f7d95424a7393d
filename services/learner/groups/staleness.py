"""Staleness: how old the weights behind a group may be (I7), and which groups are too old."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

# Why a group is dropped that no step may train on any more.
STALE = "stale"


class SampledGroup(Protocol):
    """A group of which policies have written something."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that wrote any of it; None when none has yet."""
        ...


G = TypeVar("G", bound=SampledGroup)


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Bound on how many versions a group may lag behind the trainer."""

    max_staleness: int

    def oldest_allowed(self, trainer_version: int) -> int:
        """Return the oldest version that a step from this version on may train on."""
        return trainer_version - self.max_staleness


def is_stale(group: SampledGroup, oldest_allowed: int) -> bool:
    """Return True if a version older than `oldest_allowed` wrote any of a group."""
    return group.oldest_version is not None and group.oldest_version < oldest_allowed


def keep_fresh(groups: Iterable[G], oldest_allowed: int) -> list[G]:
    """Return the groups that are not stale, in order."""
    return [group for group in groups if not is_stale(group, oldest_allowed)]
