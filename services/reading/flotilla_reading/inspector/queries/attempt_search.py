"""Search of a run's attempts, newest first: by the journal's columns, then by what was said.

A search looks at a bounded number of attempts, and reads the messages of fewer; the next one goes
on where it ended."""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flotilla_common.domain.attempts import AttemptKey
from flotilla_reading.analysis.failure_classes import classify
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.inspector.queries.group_rows import (
    TRY,
    GroupRow,
    TryRow,
    Window,
    group_rows,
    to_try,
    window_of,
)

MOST_LOOKED_AT, MOST_READ, MOST_HITS = 10_000, 200, 50
# Characters around a match.
_AROUND = 70
ReadRow = Callable[[sqlite3.Connection, AttemptKey], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class AttemptSearch:
    """What to search for: `text` in the messages, in any case, and the main class of failure. It
    begins before the attempt that arrived as number `before`."""

    wanted: AttemptFilter
    text: str = ""
    failure_class: str = ""
    before: int | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """An attempt that matches, with its group, and the text around the match."""

    row: TryRow
    group: GroupRow
    excerpt: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Attempts that match, among those looked at. `unread` counts those that were passed over
    because their messages are no longer kept."""

    hits: tuple[Hit, ...]
    looked_at: Window
    unread: int


def search_attempts(db: sqlite3.Connection, search: AttemptSearch, read: ReadRow) -> SearchResult:
    """Search a run's attempts. `read` returns the messages and the outcome of one."""
    window, reads, unread = window_of(db, "trajectories", search.before, MOST_LOOKED_AT), 0, 0
    found: list[tuple[TryRow, str]] = []
    for number, row in _candidates(db, search, window):
        if len(found) == MOST_HITS or reads == MOST_READ:
            window = replace(window, first=number + 1)
            break
        excerpt: str | None = ""
        if search.text or search.failure_class:
            reads += 1
            said = read(db, row.key)
            unread += said is None
            excerpt = _match(search, said) if said else None
        if excerpt is not None:
            found.append((row, excerpt))
    groups = {each.group_id: each for each in group_rows(db, [row.group_id for row, _ in found])}
    hits = tuple(Hit(row, groups[row.group_id], excerpt) for row, excerpt in found)
    return SearchResult(hits, window, unread)


def newest_environments(db: sqlite3.Connection) -> list[str]:
    """List the environments of the newest groups."""
    sql = (
        "SELECT DISTINCT json_extract(spec, '$.task[1]') FROM groups"
        " WHERE rowid > (SELECT max(rowid) FROM groups) - 1000 ORDER BY 1"
    )
    return [row[0] for row in db.execute(sql)]


def _candidates(
    db: sqlite3.Connection, search: AttemptSearch, window: Window
) -> Iterator[tuple[int, TryRow]]:
    """Yield the attempts that match by the journal's columns, newest first."""
    wanted = search.wanted
    if search.failure_class and wanted.passed is None:
        # Only attempts that did not pass have a class.
        wanted = replace(wanted, passed=False)
    where, arguments = wanted.to_sql()
    columns = ", ".join(f"t.{column}" for column in TRY.split(", "))
    # A cross join looks at the attempts in this order.
    sql = (
        f"SELECT t.rowid, {columns} FROM trajectories t CROSS JOIN groups g USING (group_id)"
        f" WHERE t.rowid BETWEEN ? AND ? AND {where} ORDER BY t.rowid DESC"
    )
    for number, *row in db.execute(sql, (window.first, window.last, *arguments)):
        yield number, to_try(tuple(row))


def _match(search: AttemptSearch, row: dict[str, Any]) -> str | None:
    """Return the text around the first match, "" if no text is wanted; None without a match."""
    if search.failure_class and search.failure_class not in classify(row)[:1]:
        return None
    if not search.text:
        return ""
    pattern = re.compile(re.escape(search.text), re.IGNORECASE)
    for text in _texts(row["messages"]):
        if match := pattern.search(text):
            start, end = max(match.start() - _AROUND, 0), match.end() + _AROUND
            return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
    return None


def _texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield message["content"]
        yield message.get("reasoning_content", "")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            yield f"{function['name']} {json.dumps(function['arguments'], ensure_ascii=False)}"
