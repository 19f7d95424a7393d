"""Rows of `trajectories`, converted to and from the learner's own types and verified on every
read."""

import json
import sqlite3
import time
from collections.abc import Iterable
from typing import Any

from flotilla_common.domain.attempts import AttemptKey, FailureKind
from flotilla_common.domain.trajectory import Trajectory, digest_arrays
from flotilla_common.run_folder import trajectory_codec
from flotilla_common.run_folder.record_digests import DamagedRecordError, row_digest

# In the order of their seal, with the arrays last except for the seals.
_COLUMNS = (
    "group_id, attempt_index, try, reward, failure, record_digest, content_digest, summary,"
    " array_digest"
)
_BY_KEY = "WHERE group_id = ? AND attempt_index = ? AND try = ?"
_SELECT = f"SELECT {_COLUMNS}, row_digest, payload FROM trajectories {_BY_KEY}"
_INSERT = (
    f"INSERT INTO trajectories ({_COLUMNS}, row_digest, payload, received, dropped)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)

Row = tuple[Any, ...]


class ContentConflictError(Exception):
    """Different content was journaled under the same key."""


def trajectory_row(trajectory: Trajectory) -> Row:
    """Return the row that stores a try, for `put_trajectory`."""
    key, digest = trajectory.key, trajectory_codec.record_digest(trajectory)
    summary = trajectory_codec.summary_json(trajectory)
    payload = trajectory_codec.array_bytes(trajectory)
    arrays = digest_arrays([payload])
    sealed = (
        *(key.group_id, key.attempt_index, key.attempt_try),
        *(trajectory.reward, trajectory.failure, digest, trajectory.content_digest),
        *(summary, arrays),
    )
    return (*sealed, row_digest(sealed), payload)


def put_trajectory(db: sqlite3.Connection, row: Row, dropped: str) -> bool:
    """Add a row unless it is known; return True if it is new. Raises ContentConflictError."""
    key, digest = AttemptKey(*row[:3]), row[5]
    known = record_digest(db, key)
    if known is None:
        db.execute(_INSERT, (*row, time.time(), dropped))
        return True
    if known != digest:
        raise ContentConflictError(f"other content is journaled under {key}")
    return False


def put_outcome(
    db: sqlite3.Connection, key: AttemptKey, reward: float | None, no_grade: str, detail: str
) -> None:
    """Give a try that awaits a verdict its score, or the reason for having none. Raises
    DamagedRecordError if it differs from what was written.

    The digest of its record remains that of what was submitted, so that a repeat is still one."""
    trajectory_of(db, key)
    failure = FailureKind.NO_GRADE if reward is None else None
    where = (key.group_id, key.attempt_index, key.attempt_try)
    row = db.execute(f"SELECT {_COLUMNS} FROM trajectories {_BY_KEY}", where).fetchone()
    summary = json.loads(row[7]) | {"no_grade": no_grade, "detail": detail}
    sealed = (*row[:3], reward, failure, *row[5:7], json.dumps(summary), row[8])
    db.execute(
        f"UPDATE trajectories SET reward = ?, failure = ?, summary = ?, row_digest = ? {_BY_KEY}",
        (reward, failure, sealed[7], row_digest(sealed), *where),
    )


def put_tools(db: sqlite3.Connection, digest: str, tools: bytes) -> None:
    """Keep the tools of a trajectory unless they are known."""
    db.execute("INSERT OR IGNORE INTO tools VALUES (?, ?)", (digest, tools))


def tools_of(db: sqlite3.Connection, digest: str) -> bytes:
    """Return the tools of trajectories with this digest, as JSON; empty if they are unknown."""
    row = db.execute("SELECT tools FROM tools WHERE digest = ?", (digest,)).fetchone()
    return row[0] if row else b""


def record_digest(db: sqlite3.Connection, key: AttemptKey) -> bytes | None:
    """Return the digest of the record under a key, if there is one."""
    sql = f"SELECT record_digest FROM trajectories {_BY_KEY}"
    row = db.execute(sql, (key.group_id, key.attempt_index, key.attempt_try)).fetchone()
    return row[0] if row else None


def trajectory_of(db: sqlite3.Connection, key: AttemptKey) -> Trajectory:
    """Load the trajectory under a key. Raises DamagedRecordError if it is damaged or missing."""
    row = db.execute(_SELECT, (key.group_id, key.attempt_index, key.attempt_try)).fetchone()
    if row is None:
        raise DamagedRecordError([key])
    return _row_to_trajectory(row)


def trajectories_of(
    db: sqlite3.Connection, keys: Iterable[AttemptKey]
) -> tuple[list[Trajectory], list[AttemptKey]]:
    """Return the intact trajectories, in order, and the keys of the others."""
    found: list[Trajectory] = []
    damaged: list[AttemptKey] = []
    for key in keys:
        try:
            found.append(trajectory_of(db, key))
        except DamagedRecordError:
            damaged.append(key)
    return found, damaged


def keys_of(db: sqlite3.Connection, group_id: str) -> list[AttemptKey]:
    """List all tries of a group, in order of attempt and try."""
    sql = (
        "SELECT group_id, attempt_index, try FROM trajectories WHERE group_id = ?"
        " ORDER BY attempt_index, try"
    )
    return [AttemptKey(*row) for row in db.execute(sql, (group_id,))]


def damaged_rows(db: sqlite3.Connection) -> list[AttemptKey]:
    """List the rows that differ from what was written, except in their arrays: those are compared
    when they are read."""
    rows = db.execute(f"SELECT {_COLUMNS}, row_digest FROM trajectories NOT INDEXED")
    return [AttemptKey(*row[:3]) for row in rows if row_digest(row[:-1]) != row[-1]]


def _row_to_trajectory(row: Row) -> Trajectory:
    *sealed, seal, payload = row
    group_id, index, attempt_try, reward, failure, _, content_digest, summary, arrays = sealed
    key = AttemptKey(group_id, index, attempt_try)
    whole = payload is None or digest_arrays([payload]) == arrays
    if not whole or row_digest(sealed) != seal:
        raise DamagedRecordError([key])
    return trajectory_codec.restore_trajectory(
        key, reward, failure, content_digest, summary, payload
    )
