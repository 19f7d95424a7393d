"""Consistency checks between groups, plans and trajectories."""

import sqlite3
from collections.abc import Iterator

from flotilla_common.domain.attempts import AttemptKey
from flotilla_learner.journal.plan_tables import plans_after


def find_contradictions(db: sqlite3.Connection) -> Iterator[str]:
    """Yield each contradiction as a sentence, such as a group that is open though a step trained
    on it, or a trajectory without a group. Raises JournalError if a plan is damaged."""
    planned = {key.group_id: p.step for p in plans_after(db, 0) for key in p.attempts}
    sql = "SELECT group_id, state, step FROM groups WHERE purpose = 'train'"
    states = {group: (state, step) for group, state, step in db.execute(sql)}
    for group, step in planned.items():
        state, of_step = states.get(group, ("missing", None))
        if (state, of_step) != ("planned", step):
            yield (
                f"group {group} is in the plan of step {step}, but it is"
                f" {_describe_state(state, of_step)}"
            )
    for group, (state, step) in states.items():
        if state == "planned" and group not in planned:
            yield f"group {group} is {_describe_state(state, step)}, but no plan contains it"
    yield from _find_without_group(db)


def missing_attempts(db: sqlite3.Connection) -> list[AttemptKey]:
    """List the attempts that are in a plan but not in `trajectories`."""
    sql = "SELECT group_id, attempt_index, try FROM trajectories"
    there = {AttemptKey(*row) for row in db.execute(sql)}
    return [key for plan in plans_after(db, 0) for key in plan.attempts if key not in there]


def _find_without_group(db: sqlite3.Connection) -> Iterator[str]:
    sql = (
        "SELECT group_id, count(*) FROM trajectories t WHERE NOT EXISTS"
        " (SELECT 1 FROM groups g WHERE g.group_id = t.group_id) GROUP BY group_id"
    )
    for group, count in db.execute(sql):
        yield f"{count} trajectories belong to group {group}, which is missing"


def _describe_state(state: str, step: int | None) -> str:
    return state if step is None else f"{state} for step {step}"
