"""Attempts of an evaluation, wherever they were made."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flotilla_reading.data.entries import DataError


class EvaluationError(DataError):
    """An evaluation cannot be read or continued; the message gives the reason and a fix."""


@dataclass(frozen=True, slots=True)
class EvaluatedAttempt:
    """One attempt at a task; `reward` is None if it has no grade, and `no_grade` says why."""

    task_key: str
    env_key: str
    reward: float | None
    no_grade: str = ""
    turns: int = 0
    calls: int = 0
    tool_errors: int = 0


def rewards_by_task(attempts: Iterable[EvaluatedAttempt]) -> Mapping[str, list[float]]:
    """Return the rewards of each task that was attempted; attempts without a grade have none."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for each in attempts:
        found[each.task_key] += [] if each.reward is None else [each.reward]
    return found
