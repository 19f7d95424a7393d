"""Tasks of a source, and what became of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flotilla_common.tasks.task_digests import question_digest, task_digest
from flotilla_common.tasks.task_files import TaskRow
from flotilla_common.tasks.task_format import Task


class DataError(Exception):
    """The data cannot be used as wished; the message gives the reason and the remedy."""


class Reason(StrEnum):
    """Why a task is dropped, in the order of examination: the first that applies counts."""

    QUARANTINED = "quarantined"
    INVALID = "invalid"
    REPEATED = "repeated"
    OTHER_MODALITY = "other_modality"
    OTHER_ENV = "other_env"
    OTHER_DIFFICULTY = "other_difficulty"
    RELATIVE_DATE = "relative_date"
    NO_DATA_KEY = "no_data_key"
    OVER_MAX_TASKS = "over_max_tasks"
    OVER_MAX_EVAL = "over_max_eval"
    EQUALS_EVAL = "equals_eval"
    OVER_ENV_SHARE = "over_env_share"


# Those that are faults of the data; the others are wishes of the user.
FAULTS = (Reason.INVALID, Reason.RELATIVE_DATE, Reason.NO_DATA_KEY, Reason.EQUALS_EVAL)


@dataclass(frozen=True, slots=True)
class Entry:
    """A task of the source, with its digests. `fields` and `text` are its JSON."""

    place: str
    fields: Mapping[str, Any]
    text: str
    task: Task
    digest: str
    question: str

    @property
    def key(self) -> str:
        return self.task.key

    @property
    def env_key(self) -> str:
        return self.task.env_key


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row of the source that is in neither part, by the first reason for it."""

    place: str
    key: str
    env_key: str
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of every row of a source: each is in exactly one of these. `matches` has for
    each rule of the quarantine its number of rows."""

    train: Sequence[Entry]
    eval: Sequence[Entry]
    dropped: Sequence[Dropped]
    matches: Sequence[int] = ()

    @property
    def rows(self) -> int:
        """Number of rows of the source."""
        return len(self.train) + len(self.eval) + len(self.dropped)


def to_entry(row: TaskRow, task: Task) -> Entry:
    return Entry(
        *(row.place, row.fields, row.text, task),
        task_digest(task, row.fields),
        question_digest(task),
    )


def drop(entry: Entry, reason: Reason, detail: str = "") -> Dropped:
    return Dropped(entry.place, entry.key, entry.env_key, reason, detail)
