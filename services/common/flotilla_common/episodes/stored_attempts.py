"""Attempts of a step or an evaluation, read from a journal that another process writes."""

import sqlite3
from collections.abc import Iterator
from typing import Any

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.episodes.episode_rows import StoredAttempt
from flotilla_common.run_folder.journal_columns import group_task
from flotilla_common.run_folder.record_digests import DamagedRecordError
from flotilla_common.run_folder.trajectory_tables import trajectory_of

_SELECT = """
SELECT t.group_id, t.attempt_index, t.try, t.dropped, t.received, g.reason, g.spec, g.purpose,
  g.eval_id, g.step, e.version
FROM trajectories t JOIN groups g USING (group_id) LEFT JOIN evals e USING (eval_id)
"""
_ORDER = "ORDER BY g.step, g.eval_id, t.group_id, t.attempt_index, t.try"


def count_attempts(db: sqlite3.Connection, where: str, arguments: tuple[Any, ...]) -> int:
    """Count the attempts that `find_attempts` would yield, including damaged ones."""
    sql = f"SELECT count(*) FROM trajectories t JOIN groups g USING (group_id) WHERE {where}"
    (count,) = db.execute(sql, arguments).fetchone()
    return int(count)


def find_attempts(
    db: sqlite3.Connection, where: str, arguments: tuple[Any, ...]
) -> Iterator[StoredAttempt]:
    """Yield the intact attempts that an SQL condition on `t` (trajectories) and `g` (groups)
    selects, by group. Raises DamagedColumnError."""
    for row in db.execute(f"{_SELECT} WHERE {where} {_ORDER}", arguments).fetchall():
        group_id, index, attempt_try, dropped, received, reason, spec, purpose, *place = row
        try:
            trajectory = trajectory_of(db, AttemptKey(group_id, index, attempt_try))
        except DamagedRecordError:
            # Already reported as an incident of the journal.
            continue
        eval_id, step, version = place
        task = group_task(group_id, spec)
        yield StoredAttempt(
            trajectory,
            task.env_key,
            task.task_key,
            purpose,
            eval_id,
            version if eval_id else step,
            dropped or reason,
            received,
        )
