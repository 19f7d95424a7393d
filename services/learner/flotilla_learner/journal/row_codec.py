"""Rows of the journal, converted from and to the learner's own types within one transaction or
query."""

import json
import sqlite3
from dataclasses import replace
from typing import Any

from flotilla_common.domain.attempts import Purpose
from flotilla_common.domain.policy import PolicyId
from flotilla_common.run_folder.picture_tables import whole_trajectories_of
from flotilla_common.run_folder.trajectory_tables import keys_of
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.journal.run_progress import acknowledged_tries, lost_tries
from flotilla_learner.journal.schema import LOST_WITH_DISK, StoredGroup
from flotilla_learner.sampling.tasks import Task

_SPEC = "group_id, sequence_number, purpose, eval_id, spec"


def put_group(db: sqlite3.Connection, spec: GroupSpec, *, leased: bool) -> None:
    """Add a group unless it is known; a lease is never forgotten."""
    row = (spec.group_id, spec.sequence_number, spec.purpose, spec.eval_id, _spec_to_json(spec))
    db.execute(
        "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, 'open', '', NULL)"
        " ON CONFLICT (group_id) DO UPDATE SET leased = max(leased, excluded.leased)",
        (*row, leased),
    )


def unfinished_groups(db: sqlite3.Connection) -> list[StoredGroup]:
    """List the TRAIN groups that are neither planned nor dropped, oldest first."""
    return _stored_groups(db, "state = 'open'")


def replaced_groups(db: sqlite3.Connection) -> list[StoredGroup]:
    """List the filtered TRAIN groups that no step has counted yet, oldest first."""
    return _stored_groups(db, "state = 'filtered' AND step IS NULL")


def next_sequence_number(db: sqlite3.Connection) -> int:
    """Return the sequence number at which the curriculum continues."""
    sql = "SELECT coalesce(max(sequence_number), -1) + 1 FROM groups WHERE purpose = 'train'"
    return int(db.execute(sql).fetchone()[0])


def count_fates(db: sqlite3.Connection) -> dict[str, int]:
    """Count acknowledged tries by fate (I2); the fates sum to `acknowledged`."""
    sql = """
    SELECT CASE WHEN t.failure IS NOT NULL THEN 'failed'
                WHEN t.dropped != '' THEN 'dropped/' || t.dropped
                WHEN g.state = 'planned' THEN 'trained'
                WHEN g.state = 'evaluated' THEN 'evaluated'
                WHEN g.state IN ('dropped', 'filtered') THEN 'dropped/' || g.reason
                ELSE 'queued' END AS fate, count(*)
    FROM trajectories t JOIN groups g USING (group_id) GROUP BY fate"""
    fates = dict(db.execute(sql).fetchall())
    lost = lost_tries(db)
    gone = {LOST_WITH_DISK: lost} if lost else {}
    return {**fates, **gone, "acknowledged": acknowledged_tries(db)}


def _stored_groups(db: sqlite3.Connection, condition: str) -> list[StoredGroup]:
    rows = db.execute(
        f"SELECT {_SPEC}, leased FROM groups WHERE purpose = 'train' AND {condition}"
        " ORDER BY sequence_number, group_id"
    ).fetchall()
    return [_row_to_stored_group(db, row) for row in rows]


def _row_to_stored_group(db: sqlite3.Connection, row: tuple[Any, ...]) -> StoredGroup:
    *columns, leased = row
    spec = _row_to_spec(columns)
    # A worker's newest lease names the incarnation that may still be alive.
    lease = db.execute(
        "SELECT lease_id, worker_id, incarnation, request_id FROM leases l WHERE rowid ="
        " (SELECT max(rowid) FROM leases WHERE group_id = ?) AND incarnation ="
        " (SELECT incarnation FROM leases WHERE worker_id = l.worker_id"
        "  ORDER BY rowid DESC LIMIT 1)",
        (spec.group_id,),
    ).fetchone()
    sql = "SELECT attempt_index, try, dropped FROM trajectories WHERE group_id = ?"
    dropped = {(n, m): why for n, m, why in db.execute(sql, (spec.group_id,))}
    found, damaged = whole_trajectories_of(db, keys_of(db, spec.group_id))
    # Pictures were compared with their hashes; all waiting groups' would fill the memory.
    bare = [replace(t, pictures={}) for t in found]
    tries = [(t, dropped[t.key.attempt_index, t.key.attempt_try]) for t in bare]
    return StoredGroup(spec, bool(leased), lease, tuple(tries), tuple(damaged))


def _spec_to_json(spec: GroupSpec) -> str:
    policy = spec.exact_policy
    return json.dumps(
        {
            "task": [spec.task.key, spec.task.env_key, spec.task.json],
            "size": spec.size,
            "temperature": spec.temperature,
            "requeues": spec.requeues,
            "top_k": spec.top_k,
            "top_p": spec.top_p,
            "exact": [policy.run_epoch, policy.version] if policy else None,
        },
        ensure_ascii=False,
    )


def _row_to_spec(row: list[Any]) -> GroupSpec:
    group_id, sequence_number, purpose, eval_id, text = row
    data = json.loads(text)
    return GroupSpec(
        group_id=group_id,
        sequence_number=sequence_number,
        task=Task(*data["task"]),
        purpose=Purpose(purpose),
        size=data["size"],
        temperature=data["temperature"],
        requeues=data["requeues"],
        eval_id=eval_id,
        exact_policy=PolicyId(*data["exact"]) if data["exact"] else None,
        # Not in format 7.
        top_k=data.get("top_k", 0),
        top_p=data.get("top_p", 1.0),
    )
