"""The curriculum's changes in the journal, and what a restart reads of them."""

import json
import sqlite3
import time
from dataclasses import astuple, dataclass
from typing import Any

from services.learner.groups.types import GroupSpec
from services.learner.journal.row_codec import put_group
from services.learner.sampling.curriculum_changes import Change, Cursor, Standing, Stored, TaskState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A change, and the groups that were drawn before it and may not be journaled yet."""

    change: Change
    drawn: tuple[GroupSpec, ...]


def put_snapshot(db: sqlite3.Connection, snapshot: Snapshot) -> None:
    """Journal a change. From it on, every lower sequence number has its group."""
    change = snapshot.change
    for spec in snapshot.drawn:
        put_group(db, spec, leased=False)
    cursors = json.dumps({env: astuple(cursor) for env, cursor in change.cursors.items()})
    row = db.execute(
        "INSERT INTO curriculum (number, step, cursors, made) VALUES (?, ?, ?, ?)",
        (change.number, change.step, cursors, time.time()),
    )
    db.executemany(
        "INSERT OR REPLACE INTO curriculum_tasks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [astuple(state) for state in change.tasks],
    )
    db.executemany(
        "INSERT INTO curriculum_events (change, task, env, kind, reason) VALUES (?, ?, ?, ?, ?)",
        [(row.lastrowid, e.task, e.env, e.kind, e.reason) for e in change.events],
    )


def stored_curriculum(db: sqlite3.Connection) -> Stored:
    """Where the newest change left off."""
    sql = "SELECT number, cursors FROM curriculum ORDER BY id DESC LIMIT 1"
    newest = db.execute(sql).fetchone()
    if newest is None:
        return Stored()
    number, text = newest
    cursors = {env: Cursor(*row) for env, row in json.loads(text).items()}
    rows = db.execute(
        "SELECT task, env, standing, groups, passes, attempts, queued, turn, member"
        " FROM curriculum_tasks"
    )
    tasks = tuple(
        TaskState(task, env, Standing(standing), *rest, member=bool(member))
        for task, env, standing, *rest, member in rows
    )
    return Stored(number, cursors, tasks)


def left_out(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """The tasks that are parked or quarantined, with why, as plain values."""
    rows = db.execute(
        "SELECT task, env, standing, groups, passes, attempts,"
        " (SELECT reason FROM curriculum_events e WHERE e.task = t.task AND kind != 'probed'"
        "  ORDER BY id DESC LIMIT 1)"
        " FROM curriculum_tasks t WHERE standing != 'active' ORDER BY standing, env, task"
    )
    return [
        {
            "task_key": task,
            "env_key": env,
            "standing": standing,
            "groups": groups,
            "pass_rate": passes / attempts if attempts else None,
            "reason": reason or "",
        }
        for task, env, standing, groups, passes, attempts, reason in rows
    ]


def drawn_tasks(db: sqlite3.Connection) -> set[str]:
    """Keys of the tasks of all TRAIN groups."""
    sql = "SELECT DISTINCT json_extract(spec, '$.task[0]') FROM groups WHERE purpose = 'train'"
    return {key for (key,) in db.execute(sql)}


def opened_environments(db: sqlite3.Connection) -> set[str]:
    """The environments of which the run has a graded attempt."""
    sql = (
        "SELECT DISTINCT json_extract(spec, '$.task[1]') FROM groups g WHERE EXISTS"
        " (SELECT 1 FROM trajectories t WHERE t.group_id = g.group_id AND t.reward IS NOT NULL)"
    )
    return {env for (env,) in db.execute(sql)}
