"""One task over a run: its groups, of training and of evaluations."""

import sqlite3
from dataclasses import dataclass, replace

from flotilla_reading.inspector.queries.group_rows import (
    GroupRow,
    Window,
    group_rows,
    window_of,
    with_tries,
)

MOST_LOOKED_AT, MOST_GROUPS = 20_000, 50


@dataclass(frozen=True, slots=True)
class TaskGroups:
    """Groups of a task with their tries, newest first, among the groups looked at."""

    groups: tuple[GroupRow, ...]
    looked_at: Window


def read_task(
    db: sqlite3.Connection, task_key: str, before: int | None = None, also: str = ""
) -> TaskGroups:
    """Read the newest groups of a task, or those before a group, and the group `also`."""
    window = window_of(db, "groups", before, MOST_LOOKED_AT)
    sql = (
        "SELECT rowid, group_id FROM groups WHERE rowid BETWEEN ? AND ?"
        " AND json_extract(spec, '$.task[0]') = ? ORDER BY rowid DESC LIMIT ?"
    )
    rows = db.execute(sql, (window.first, window.last, task_key, MOST_GROUPS)).fetchall()
    if len(rows) == MOST_GROUPS:
        window = replace(window, first=rows[-1][0])
    ids = dict.fromkeys((*(group_id for _, group_id in rows), also))
    groups = [group for group in group_rows(db, list(ids)) if group.task_key == task_key]
    return TaskGroups(tuple(with_tries(db, group) for group in groups), window)
