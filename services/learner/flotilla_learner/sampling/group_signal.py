"""Signal of a group: whether its rewards differ, so that the policy can learn from it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Rewards of one group's graded attempts."""

    task: str
    rewards: Sequence[float]


def has_signal(rewards: Sequence[float]) -> bool:
    """Return True if an attempt was better than another; otherwise its group has no gradient."""
    return len(set(rewards)) > 1
