"""Rows of `plans`, converted to and from the learner's own types."""

import json
import sqlite3
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_common.run_folder.record_digests import row_digest
from flotilla_learner.journal.schema import Plan
from flotilla_learner.types import StepSettings

_COLUMNS = "step, run_epoch, attempts, settings"


def put_plan(db: sqlite3.Connection, plan: Plan, epoch: int) -> None:
    """Add the plan of a new step."""
    _write_row(
        db, (plan.step, epoch, _keys_to_json(plan.attempts), json.dumps(asdict(plan.settings)))
    )


def plans_after(db: sqlite3.Connection, step: int) -> list[Plan]:
    """Load the plans of later steps, in order. Raises JournalError if one is damaged."""
    return [_row_to_plan(row) for row in _read_rows(db, step)]


def remove_from_plans(db: sqlite3.Connection, groups: Collection[str]) -> None:
    """Remove these groups from every plan."""
    for row in _read_rows(db, 0):
        attempts = _row_to_plan(row).attempts
        kept = tuple(key for key in attempts if key.group_id not in groups)
        if len(kept) < len(attempts):
            step, epoch, _, *others, _ = row
            _write_row(db, (step, epoch, _keys_to_json(kept), *others))


def _write_row(db: sqlite3.Connection, row: tuple[Any, ...]) -> None:
    sql = f"INSERT OR REPLACE INTO plans ({_COLUMNS}, row_digest) VALUES (?, ?, ?, ?, ?)"
    db.execute(sql, (*row, row_digest(row)))


def _read_rows(db: sqlite3.Connection, step: int) -> list[tuple[Any, ...]]:
    sql = f"SELECT {_COLUMNS}, row_digest FROM plans WHERE step > ? ORDER BY step"
    return db.execute(sql, (step,)).fetchall()


def _row_to_plan(row: tuple[Any, ...]) -> Plan:
    *values, seal = row
    step, _, attempts, settings = values
    if row_digest(values) != seal:
        raise JournalError(
            f"the journal's plan of step {step} is damaged: restore the journal from a copy, or"
            " start a new run"
        )
    keys = tuple(AttemptKey(*key) for key in json.loads(attempts))
    return Plan(step, keys, StepSettings(**json.loads(settings)))


def _keys_to_json(keys: tuple[AttemptKey, ...]) -> str:
    return json.dumps([[k.group_id, k.attempt_index, k.attempt_try] for k in keys])
