"""Attempts in a transcript: those of a step, including the ones it left out, or of an
evaluation."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from flotilla_common.domain.attempts import AttemptKey
from flotilla_reading.inspector.queries.group_rows import GroupRow, TryRow, with_tries
from flotilla_reading.inspector.queries.step_pages import read_eval, read_step

MOST_ATTEMPTS = 256


@dataclass(frozen=True, slots=True)
class TranscriptSubject:
    """A step, or an evaluation."""

    step: int | None = None
    eval_id: str = ""

    @property
    def title(self) -> str:
        return f"evaluation {self.eval_id}" if self.step is None else f"step {self.step}"


@dataclass(frozen=True, slots=True)
class TranscriptAttempts:
    """Attempts in page order, at most the first ones; `note` states what was left out."""

    tries: tuple[tuple[GroupRow, TryRow], ...]
    note: str


def read_attempts(
    db: sqlite3.Connection, subject: TranscriptSubject, most: int = MOST_ATTEMPTS
) -> TranscriptAttempts:
    """Read the attempts of a step or an evaluation. Raises NotFoundError."""
    tries: list[tuple[GroupRow, TryRow]] = []
    for group in _groups_of(db, subject):
        tries += ((group, row) for row in group.tries)
        # One extra row shows whether there are more.
        if len(tries) > most:
            note = f"Only the first {most} attempts of {subject.title} are shown here."
            return TranscriptAttempts(tuple(tries[:most]), note)
    return TranscriptAttempts(tuple(tries), "")


def sample_place(key: AttemptKey) -> tuple[str, int]:
    """Return the place of an attempt in its log: the id and the epoch of its sample."""
    suffix = f"-try-{key.attempt_try}" if key.attempt_try else ""
    return f"{key.group_id}{suffix}", key.attempt_index + 1


def _groups_of(db: sqlite3.Connection, subject: TranscriptSubject) -> Iterator[GroupRow]:
    page, pages = 1, 1
    while page <= pages:
        if subject.step is None:
            groups = read_eval(db, subject.eval_id, page).groups
        else:
            groups = read_step(db, subject.step, page).trained
        yield from groups.groups
        page, pages = page + 1, groups.pages
    if subject.step is not None:
        found = read_step(db, subject.step)
        yield from (with_tries(db, group) for group in (*found.filtered, *found.dropped))
