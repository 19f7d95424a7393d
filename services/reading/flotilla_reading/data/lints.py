"""Faults of a task that the env_gateway accepts, and that make it unsolvable or its grade
meaningless. Pure."""

import re
from collections.abc import Collection

from flotilla_common.spec.config import did_you_mean
from flotilla_common.tasks.task_format import SINGLE_TURN, Task
from flotilla_reading.data.entries import DataError, Reason

_DAYS = "monday|tuesday|wednesday|thursday|friday|saturday|sunday"
_SPANS = f"day|week|weekend|month|quarter|year|{_DAYS}"
# Words that mean another day on another day.
_RELATIVE_DATE = re.compile(
    rf"\b(?:today|tonight|tomorrow|yesterday"
    rf"|(?:next|last|this|coming|upcoming|previous|past)\s+(?:{_SPANS})"
    rf"|this\s+(?:morning|afternoon|evening)"
    rf"|(?:in|within)\s+(?:\d+|a|an|one|two|three|four|five|six|seven)\s+(?:day|week|month|year)s?"
    rf"|(?:day|week|month|year)s?\s+(?:ago|from\s+now))\b",
    re.IGNORECASE,
)
# A verifier that reads the data with which its environment began, or how they are now.
_READS_DATA = re.compile(r"\.\s*(?:db|instance)\b")


LINTS = (Reason.RELATIVE_DATE, Reason.NO_DATA_KEY)


def find_fault(task: Task, allow: Collection[Reason] = ()) -> tuple[Reason, str] | None:
    """Return what is wrong with a task, and where it shows; None if nothing is but what is
    allowed."""
    found = None if task.current_date else _RELATIVE_DATE.search(task.prompt)
    if found and Reason.RELATIVE_DATE not in allow:
        return Reason.RELATIVE_DATE, f"the prompt says {found[0]!r}, and CURRENT_DATE is missing"
    if Reason.NO_DATA_KEY not in allow and _needs_data_key(task):
        return (
            Reason.NO_DATA_KEY,
            "the verifier reads the environment's data, and data_id is missing",
        )
    return None


def _needs_data_key(task: Task) -> bool:
    """Return True if the verifier compares with data that the task does not name: the environment
    would begin with its default data, and not with those that the verifier was written for."""
    if task.modality == SINGLE_TURN or task.data_key or not task.verifier:
        return False
    return _READS_DATA.search(task.verifier) is not None


def parse_lints(names: Collection[str]) -> tuple[Reason, ...]:
    """Return lints by their names. Raises DataError."""
    known = [lint.value for lint in LINTS]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise DataError(
                f"--allow: there is no lint {name!r}{hint}; there are {', '.join(known)}"
            )
    return tuple(lint for lint in LINTS if lint.value in names)
