"""Quarantine of groups with damaged records."""

import sqlite3
from collections.abc import Sequence

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.record_digests import CORRUPT
from flotilla_learner.journal.plan_tables import remove_from_plans

DAMAGED = "records of the journal are damaged: their groups are dropped"


def put_in_quarantine(db: sqlite3.Connection, keys: Sequence[AttemptKey]) -> list[str]:
    """Drop damaged tries and their groups, and remove the groups from every plan; return them."""
    groups = sorted({key.group_id for key in keys})
    db.executemany(
        "UPDATE trajectories SET dropped = ? WHERE group_id = ? AND attempt_index = ? AND try = ?",
        [(CORRUPT, key.group_id, key.attempt_index, key.attempt_try) for key in keys],
    )
    db.executemany(
        "UPDATE groups SET state = 'dropped', reason = ? WHERE group_id = ?",
        [(CORRUPT, group_id) for group_id in groups],
    )
    remove_from_plans(db, groups)
    return groups
