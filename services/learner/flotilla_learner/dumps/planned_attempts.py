"""Attempts that a step trains on, read from the journal by another process than its writer."""

import sqlite3

from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.run_folder.record_digests import DamagedRecordError
from flotilla_common.run_folder.trajectory_tables import trajectory_of
from flotilla_learner.journal.plan_tables import plans_after


class NotInJournalError(Exception):
    """The journal lacks data for a dump; the message names it."""


def planned_attempts(db: sqlite3.Connection, step: int) -> list[Trajectory]:
    """Load the attempts that a step trains on, in the plan's order. Raises NotInJournalError."""
    plan = next((plan for plan in plans_after(db, step - 1) if plan.step == step), None)
    if plan is None:
        raise NotInJournalError(f"the journal has no plan of step {step}")
    try:
        attempts = [trajectory_of(db, key) for key in plan.attempts]
    except DamagedRecordError as error:
        raise NotInJournalError(f"a record of step {step} is damaged: {error}") from error
    if any(not attempt.sequences for attempt in attempts):
        raise NotInJournalError(f"tokens of step {step} were pruned")
    return attempts
