"""Steps and evaluations: their groups, and the dropped ones."""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_common.run_folder.journal_columns import decode_column
from flotilla_reading.inspector.queries.group_rows import GroupRow, TryRow, group_rows, with_tries
from flotilla_reading.inspector.queries.run_folders import NotFoundError

GROUPS_PER_PAGE = 25
STEPS_PER_PAGE = 50
# Groups drawn up to this much before or after those of a step may have been filtered by it.
_AROUND = 2048
_MOST_DROPPED = 200
_NO_END = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class StepCard:
    """One step in the list."""

    step: int
    run_epoch: int


@dataclass(frozen=True, slots=True)
class GroupsPage:
    """One page of the groups of a step or an evaluation, and its place among the pages."""

    groups: tuple[GroupRow, ...]
    total: int
    page: int
    pages: int
    worst: TryRow | None


@dataclass(frozen=True, slots=True)
class StepPage:
    """One step: the groups it trained on, and those it left out, with the reason."""

    step: int
    run_epoch: int
    attempts: int
    trained: GroupsPage
    # Number of groups without signal: trained ones (`constant_groups = "mask"`) and filtered ones.
    without_signal: int
    # Groups left out without signal; and dropped ones, drawn since the last group of the previous
    # step.
    filtered: tuple[GroupRow, ...]
    dropped: tuple[GroupRow, ...]
    earlier: int | None
    later: int | None


@dataclass(frozen=True, slots=True)
class EvalCard:
    """One evaluation; `results` by set, as the learner reported them."""

    eval_id: str
    moment: str
    version: int
    results: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EvalPage:
    """One evaluation and a page of its groups, lowest mean reward first."""

    card: EvalCard
    groups: GroupsPage


def list_steps(db: sqlite3.Connection, *, before: int | None = None) -> list[StepCard]:
    """List a page of steps, newest first; only those below `before` if given."""
    sql = "SELECT step, run_epoch FROM plans WHERE step < ? ORDER BY step DESC LIMIT ?"
    top = (1 << 62) if before is None else before
    return [StepCard(*row) for row in db.execute(sql, (top, STEPS_PER_PAGE))]


def read_step(db: sqlite3.Connection, step: int, page: int = 1) -> StepPage:
    """Read one step, its groups by signal. Raises NotFoundError."""
    row = db.execute("SELECT run_epoch, attempts FROM plans WHERE step = ?", (step,)).fetchone()
    if row is None:
        raise NotFoundError(f"Step {step} has no plan in the journal: it has not begun.")
    epoch, attempts = row[0], _attempts_of(row[1], step)
    ids = list(dict.fromkeys(key[0] for key in attempts))
    groups = sorted(group_rows(db, ids), key=lambda g: (-g.signal, g.mean or 0.0, g.group_id))
    around = _rows_around(db, ids)
    earlier, later = _neighbour(db, "max", "<", step), _neighbour(db, "min", ">", step)
    since = _last_row(db, earlier) if earlier is not None else 0
    until = _last_row(db, step) if later is not None else _NO_END
    filtered = _find_groups(db, "filtered", around, step)
    return StepPage(
        step=step,
        run_epoch=epoch,
        attempts=len(attempts),
        trained=_page_of(db, groups, page),
        without_signal=sum(not group.signal for group in (*groups, *filtered)),
        filtered=tuple(filtered),
        dropped=tuple(_find_groups(db, "dropped", (since + 1, until), None)),
        earlier=earlier,
        later=later,
    )


def list_evals(db: sqlite3.Connection) -> list[EvalCard]:
    """List the newest finished evaluations."""
    sql = "SELECT eval_id, moment, version, results FROM evals ORDER BY rowid DESC LIMIT 200"
    return [_to_eval(row) for row in db.execute(sql)]


def read_eval(db: sqlite3.Connection, eval_id: str, page: int = 1) -> EvalPage:
    """Read one evaluation. Raises NotFoundError."""
    sql = "SELECT eval_id, moment, version, results FROM evals WHERE eval_id = ?"
    row = db.execute(sql, (eval_id,)).fetchone()
    ids = _eval_groups(db, eval_id)
    if row is None and not ids:
        raise NotFoundError(f"There is no evaluation {eval_id!r} in the journal.")
    card = _to_eval(row) if row else EvalCard(eval_id, eval_id.split("-")[0], 0, {})
    groups = group_rows(db, ids)
    groups.sort(key=lambda g: (g.mean is None, g.mean or 0.0, g.group_id))
    return EvalPage(card, _page_of(db, groups, page))


def _eval_groups(db: sqlite3.Connection, eval_id: str) -> list[str]:
    # Its groups are named EVAL_ID-SET-NUMBER, and "." sorts after "-": no index has its id.
    sql = "SELECT group_id FROM groups WHERE group_id > ? AND group_id < ? AND eval_id = ?"
    return [row[0] for row in db.execute(sql, (f"{eval_id}-", f"{eval_id}.", eval_id))]


def _page_of(db: sqlite3.Connection, groups: Sequence[GroupRow], page: int) -> GroupsPage:
    pages = max(1, -(-len(groups) // GROUPS_PER_PAGE))
    page = min(max(1, page), pages)
    start = (page - 1) * GROUPS_PER_PAGE
    shown = [with_tries(db, group) for group in groups[start : start + GROUPS_PER_PAGE]]
    return GroupsPage(tuple(shown), len(groups), page, pages, _worst_try(db, groups))


def _worst_try(db: sqlite3.Connection, groups: Sequence[GroupRow]) -> TryRow | None:
    """Return the worst of all tries; among equals, that of the group with the most signal."""
    graded = [group for group in groups if group.rewards]
    if not graded:
        return None
    worst = min(graded, key=lambda group: min(group.rewards))
    return with_tries(db, worst).tries[0]


def _rows_around(db: sqlite3.Connection, group_ids: Sequence[str]) -> tuple[int, int]:
    """Return the first and last row that a step's groups, kept or not, may occupy."""
    rows = _row_numbers(db, group_ids)
    return (min(rows) - _AROUND, max(rows) + _AROUND) if rows else (0, -1)


def _last_row(db: sqlite3.Connection, step: int) -> int:
    (attempts,) = db.execute("SELECT attempts FROM plans WHERE step = ?", (step,)).fetchone()
    return max(_row_numbers(db, {key[0] for key in _attempts_of(attempts, step)}), default=0)


def _attempts_of(attempts: Any, step: int) -> list[tuple[str, int, int]]:
    where = f"the attempts of step {step}"
    return decode_column(attempts, list[tuple[str, int, int]], where)


def _row_numbers(db: sqlite3.Connection, group_ids: Iterable[str]) -> list[int]:
    sql = "SELECT rowid FROM groups WHERE group_id = ?"
    return [row[0] for each in group_ids if (row := db.execute(sql, (each,)).fetchone())]


def _find_groups(
    db: sqlite3.Connection, state: str, around: tuple[int, int], step: int | None
) -> list[GroupRow]:
    # `+step` makes SQLite use the index by state, whose entries hold the row number.
    sql = (
        "SELECT group_id FROM groups WHERE state = ? AND purpose = 'train'"
        " AND rowid BETWEEN ? AND ? AND (? IS NULL OR +step = ?) LIMIT ?"
    )
    values = (state, *around, step, step, _MOST_DROPPED)
    return group_rows(db, [row[0] for row in db.execute(sql, values)])


def _neighbour(db: sqlite3.Connection, which: str, sign: str, step: int) -> int | None:
    return db.execute(f"SELECT {which}(step) FROM plans WHERE step {sign} ?", (step,)).fetchone()[0]


def _to_eval(row: tuple[Any, ...]) -> EvalCard:
    eval_id, moment, version, results = row
    where = f"the results of evaluation {eval_id}"
    return EvalCard(eval_id, moment, version, decode_column(results, dict[str, Any], where))
