"""Queries for how far a run has come according to its journal."""

import json
import sqlite3

from flotilla_learner.journal.schema import LOST_WITH_DISK, RUN_ID


def owner_of(db: sqlite3.Connection) -> str:
    """Return the id of the journal's run; empty if it is gone."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (RUN_ID,)).fetchone()
    return str(json.loads(row[0])) if row else ""


def newest_epoch(db: sqlite3.Connection) -> int:
    """Return the newest run epoch; 0 before the first."""
    return int(db.execute("SELECT coalesce(max(run_epoch), 0) FROM epochs").fetchone()[0])


def planned_step(db: sqlite3.Connection) -> int:
    """Return the newest step with a plan; 0 before the first."""
    return int(db.execute("SELECT coalesce(max(step), 0) FROM plans").fetchone()[0])


def replayed_version(db: sqlite3.Connection) -> int:
    """Return the version at which a start from this journal takes over, after replaying all
    plans."""
    (saved,) = db.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()
    return max(planned_step(db), saved)


def lost_tries(db: sqlite3.Connection) -> int:
    """Count the acknowledged tries that were lost with the disks of earlier starts."""
    query = "SELECT CAST(value AS INTEGER) FROM meta WHERE key = ?"
    (lost,) = db.execute(query, (LOST_WITH_DISK,)).fetchone() or (0,)
    return lost


def acknowledged_tries(db: sqlite3.Connection) -> int:
    """Count all tries that the run has acknowledged, including lost ones."""
    (received,) = db.execute("SELECT count(*) FROM trajectories").fetchone()
    return received + lost_tries(db)
