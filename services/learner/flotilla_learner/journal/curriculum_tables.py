"""Journal tables of curriculum changes, and queries for a restart."""

import json
import sqlite3
import time
from dataclasses import astuple, dataclass

from flotilla_learner.group_types import GroupSpec
from flotilla_learner.journal.row_codec import put_group
from flotilla_learner.sampling.curriculum_changes import (
    CurriculumChange,
    PassCursor,
    StoredCurriculum,
    TaskStanding,
    TaskState,
)


@dataclass(frozen=True, slots=True)
class CurriculumSnapshot:
    """A curriculum change, with the groups drawn before it that may not be journaled yet."""

    change: CurriculumChange
    drawn: tuple[GroupSpec, ...]


def put_snapshot(db: sqlite3.Connection, snapshot: CurriculumSnapshot) -> None:
    """Journal a change. From then on, every lower sequence number has its group."""
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


def stored_curriculum(db: sqlite3.Connection) -> StoredCurriculum:
    """Load the state after the newest change."""
    sql = "SELECT number, cursors FROM curriculum ORDER BY id DESC LIMIT 1"
    newest = db.execute(sql).fetchone()
    if newest is None:
        return StoredCurriculum()
    number, text = newest
    cursors = {env: PassCursor(*row) for env, row in json.loads(text).items()}
    rows = db.execute(
        "SELECT task, env, standing, groups, passes, attempts, queued, turn, member"
        " FROM curriculum_tasks"
    )
    tasks = tuple(
        TaskState(task, env, TaskStanding(standing), *rest, member=bool(member))
        for task, env, standing, *rest, member in rows
    )
    return StoredCurriculum(number, cursors, tasks)


def drawn_tasks(db: sqlite3.Connection) -> set[str]:
    """Return the keys of all tasks with a TRAIN group."""
    sql = "SELECT DISTINCT json_extract(spec, '$.task[0]') FROM groups WHERE purpose = 'train'"
    return {key for (key,) in db.execute(sql)}


def opened_environments(db: sqlite3.Connection) -> set[str]:
    """Return the environments with at least one graded attempt."""
    sql = (
        "SELECT DISTINCT json_extract(spec, '$.task[1]') FROM groups g WHERE EXISTS"
        " (SELECT 1 FROM trajectories t WHERE t.group_id = g.group_id AND t.reward IS NOT NULL)"
    )
    return {env for (env,) in db.execute(sql)}
