"""Runs: folders with a journal."""

import json
import re
import sqlite3
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.domain.eval_groups import MAIN_SET
from flotilla_common.run_folder.journal_columns import decode_column
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, LOCK, JournalError, open_read_only
from flotilla_common.run_folder.metric_lines import METRICS_FILE
from flotilla_common.spec.spec_values import planned_steps
from flotilla_common.text.parsing import as_object

# The launcher's names of runs; this keeps paths inside the folder of runs.
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MOST_RUNS = 500
_BRIEF_S = 120.0


class NotFoundError(Exception):
    """A page's subject does not exist; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class RunCard:
    """One run in the list. Times are unix seconds."""

    run_id: str
    state: str
    steps: int
    total_steps: int | None
    model: str
    changed: float
    # pass@1 on the held-out tasks, before and after; None if not evaluated.
    before: float | None
    after: float | None
    problem: str = ""


def find_run(runs: Path, run_id: str) -> Path:
    """Return the folder of a run. Raises NotFoundError."""
    folder = runs / run_id
    if _RUN_ID.fullmatch(run_id) and (folder / JOURNAL_FILE).exists():
        return folder
    raise NotFoundError(f"There is no run {run_id!r} here with a journal.")


def list_runs(runs: Path) -> list[RunCard]:
    """List the runs, newest activity first."""
    journals = [path for path in runs.glob(f"*/{JOURNAL_FILE}") if path.is_file()]
    newest = sorted(journals, key=lambda path: -_changed(path.parent))[:_MOST_RUNS]
    return [describe_run(path.parent) for path in newest if _RUN_ID.fullmatch(path.parent.name)]


def describe_run(folder: Path) -> RunCard:
    """Describe a run by its files and its newest plan."""
    summary = read_object(folder / "summary.json")
    spec = read_object(folder / "spec.json")
    step, problem, passes = None, "", dict[str, float | None]()
    try:
        with read_journal(folder) as db:
            (step,) = db.execute("SELECT max(step) FROM plans").fetchone()
            passes = _passes_by_moment(db)
    except NotFoundError as error:
        problem = str(error)
    planned = planned_steps(spec)
    return RunCard(
        run_id=folder.name,
        state=state_of(folder, step, planned),
        steps=done if isinstance(done := summary.get("steps"), int) else step or 0,
        total_steps=planned,
        model=str(as_object(spec.get("policy")).get("model", "")),
        changed=_changed(folder),
        before=passes.get("before"),
        after=passes.get("after"),
        problem=problem,
    )


def _passes_by_moment(db: sqlite3.Connection) -> dict[str, float | None]:
    """Return pass@1 on the main set, before and after training."""
    rows = db.execute("SELECT moment, results FROM evals WHERE moment IN ('before', 'after')")
    found = dict[str, float | None]()
    for moment, text in rows:
        where = f"the results of the evaluation {moment} training"
        results = decode_column(text, dict[str, Any], where)
        found[moment] = as_object(results.get(MAIN_SET)).get("pass_at_1")
    return found


def state_of(folder: Path, step: int | None, planned: object) -> str:
    """Return the state of a run's learner: "running", "finished" or "stopped"."""
    if _is_locked(folder / LOCK):
        return "running"
    done = isinstance(planned, int) and step is not None and step >= planned
    return "finished" if done else "stopped"


@contextmanager
def read_journal(folder: Path) -> Generator[sqlite3.Connection]:
    """Open a run's journal for reading. Raises NotFoundError."""
    try:
        with open_read_only(folder / JOURNAL_FILE) as db:
            yield db
    except JournalError as error:
        raise NotFoundError(str(error)) from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} if it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return as_object(value)


def _is_locked(path: Path) -> bool:
    """Return True if a process holds the lock, without trying it, which could block a learner."""
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        # Not Linux, or no lock yet: recent changes mean that a learner is writing.
        return time.time() - _changed(path.parent) < _BRIEF_S
    return any(line.split()[-3].endswith(f":{inode}") for line in locks.splitlines() if line)


def _changed(folder: Path) -> float:
    times = [0.0]
    for name in (METRICS_FILE, JOURNAL_FILE, f"{JOURNAL_FILE}-wal"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)
