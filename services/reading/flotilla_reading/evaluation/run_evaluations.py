"""Evaluations that a run has made of its own policy, from its journal."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.domain.eval_groups import MAIN_SET, eval_set_of
from flotilla_common.episodes.stored_attempts import find_attempts
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError, open_read_only
from flotilla_reading.evaluation.evaluated_attempts import EvaluatedAttempt, EvaluationError


@dataclass(frozen=True, slots=True)
class RunEvaluation:
    """A finished evaluation of the policy after `step` optimizer steps. `moment` is what it was
    made for: before, during or after training, or eval_only."""

    eval_id: str
    moment: str
    step: int


def list_evaluations(run_dir: Path) -> list[RunEvaluation]:
    """Return a run's finished evaluations in their order. Raises EvaluationError."""
    try:
        with open_read_only(run_dir / JOURNAL_FILE) as db:
            return _list_evaluations(db)
    except JournalError as error:
        raise EvaluationError(str(error)) from error


def read_evaluation(
    run_dir: Path, step: int | None = None, eval_set: str = MAIN_SET
) -> tuple[RunEvaluation, list[EvaluatedAttempt]]:
    """Return the evaluation of a step, by default the newest, with its attempts at one set of
    tasks. Raises EvaluationError."""
    try:
        with open_read_only(run_dir / JOURNAL_FILE) as db:
            known = _list_evaluations(db)
            found = [each for each in known if step in (None, each.step)]
            if not found:
                raise EvaluationError(_explain_none(run_dir, known, step))
            attempts = _read_attempts(db, found[-1].eval_id, eval_set)
    except JournalError as error:
        raise EvaluationError(str(error)) from error
    if not attempts:
        where = f"run {run_dir.name}, step {found[-1].step}"
        raise EvaluationError(f"{where}: the evaluation has no attempts at the set {eval_set!r}")
    return found[-1], attempts


def _list_evaluations(db: sqlite3.Connection) -> list[RunEvaluation]:
    rows = db.execute("SELECT eval_id, moment, version FROM evals ORDER BY version, rowid")
    return [RunEvaluation(*row) for row in rows]


def _explain_none(run_dir: Path, known: list[RunEvaluation], step: int | None) -> str:
    if not known:
        return f"run {run_dir.name} has no finished evaluation; `flotilla eval` makes one"
    steps = ", ".join(str(each.step) for each in known)
    return f"run {run_dir.name} has no evaluation of step {step}; it has those of: {steps}"


def _read_attempts(db: sqlite3.Connection, eval_id: str, eval_set: str) -> list[EvaluatedAttempt]:
    """Return one attempt for each place of the evaluation's groups: that with a grade, else the
    last try."""
    found: dict[tuple[str, int], EvaluatedAttempt] = {}
    for stored in find_attempts(db, "g.eval_id = ?", (eval_id,)):
        trajectory, key = stored.trajectory, stored.trajectory.key
        place = (key.group_id, key.attempt_index)
        known = found.get(place)
        is_of_set = eval_set_of(key.group_id, eval_id) == eval_set
        if is_of_set and (known is None or known.reward is None):
            counts = trajectory.counts
            found[place] = EvaluatedAttempt(
                stored.task_key,
                stored.env_key,
                trajectory.reward,
                trajectory.no_grade or str(trajectory.failure or ""),
                counts.turns,
                counts.tool_calls,
                sum(counts.tool_errors.values()),
            )
    return list(found.values())
