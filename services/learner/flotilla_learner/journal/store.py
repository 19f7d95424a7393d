"""Durable state of the learner, in one SQLite file under the run's folder.

Every write is durable when it returns. One process at a time holds the journal of a run;
each start begins a new run epoch."""

import asyncio
import fcntl
import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any, TypeVar

from flotilla_common.run_folder.journal_file import (
    JOURNAL_FILE,
    LOCK,
    SCHEMA_VERSION,
    JournalError,
    connect_journal,
)
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.journal.attempt_tables import AttemptTables
from flotilla_learner.journal.checkpoint_tables import ResultTables
from flotilla_learner.journal.damaged_groups import DAMAGED, put_in_quarantine
from flotilla_learner.journal.progress_mark import MARK_FILE as MARK
from flotilla_learner.journal.progress_mark import ProgressMark
from flotilla_learner.journal.schema import PICTURES, RUN_ID, TABLES, TEACHER_SCORES, VERDICTS
from flotilla_learner.journal.startup_check import CheckedJournal, check_journal
from flotilla_learner.journal.step_tables import StepTables
from flotilla_learner.journal.table_checksums import current_position, reseal_tables
from flotilla_learner.run_files.run_identity import check_kinds

T = TypeVar("T")

_log = get_logger(__name__)


class Journal(AttemptTables, StepTables, ResultTables):
    """Journal of one run. Use `open_journal`."""

    def __init__(self, path: Path, mark: ProgressMark, lock: IO[str]) -> None:
        super().__init__(path, mark)
        self._lock = lock

    async def close(self) -> None:
        """Finish all writes and release the run for another process."""
        await asyncio.to_thread(self._writer.close)
        self._lock.close()

    async def wait_until_broken(self) -> None:
        """Wait until the disk refuses a write, and raise the JournalError. Nothing is acknowledged
        after that, so waiting for trajectories would never end."""
        await asyncio.wrap_future(self._writer.broken)

    async def set_meta(self, values: Mapping[str, object]) -> None:
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        await self.run_transaction(
            lambda db: db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        )

    async def read_meta(self) -> dict[str, Any]:
        rows = await self.run_read(lambda db: db.execute("SELECT key, value FROM meta").fetchall())
        return {key: json.loads(value) for key, value in rows}


def open_journal(run_dir: Path, run_id: str = "") -> Journal:
    """Open or create the journal of a run; reads everything but the arrays. A run's folder is
    called by its id, unless `run_id` differs.

    Raises JournalError if another process holds it or it has another schema, ForeignRunError if a
    file of the folder is of another run, and LostHistoryError, which lists what is missing, if it
    holds less than the run has acknowledged."""
    run_id = run_id or run_dir.name
    lock = lock_journal(run_dir)
    try:
        found = check_journal(run_dir, run_id)
        path, mark = run_dir / JOURNAL_FILE, ProgressMark(run_dir / MARK)
        if found.position is None:
            create_journal(path, mark, run_id, lambda db: None)
        elif found.damaged or found.former:
            write_and_reseal(path, mark, lambda db: put_in_quarantine(db, found.damaged))
        elif found.new_mark:
            mark.reset_to(found.position)
        journal = Journal(path, mark, lock)
    except BaseException:
        lock.close()
        raise
    _report_findings(journal, found)
    return journal


def lock_journal(run_dir: Path) -> IO[str]:
    """Lock a journal against writes by other programs, until the returned file is closed.

    Raises JournalError if another program writes to it, ForeignRunError if the folder holds what
    no run writes."""
    check_kinds(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = open(run_dir / LOCK, "w")  # noqa: SIM115 - held by the caller
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise JournalError(
            f"another learner works on {run_dir}; stop it, or give this run another folder"
        ) from None
    return lock


def create_journal(
    path: Path, mark: ProgressMark, run_id: str, work: Callable[[sqlite3.Connection], T]
) -> T:
    """Create the tables of a new journal, run `work` in its first transaction, start its mark."""

    def begin_journal(db: sqlite3.Connection) -> T:
        rows = {"schema_version": SCHEMA_VERSION, RUN_ID: json.dumps(run_id)}
        db.executemany("INSERT INTO meta VALUES (?, ?)", rows.items())
        return work(db)

    try:
        with closing(connect_journal(path)) as db:
            db.executescript(TABLES)
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path} is not a journal: {error}") from None
    return write_and_reseal(path, mark, begin_journal)


def write_and_reseal(path: Path, mark: ProgressMark, work: Callable[[sqlite3.Connection], T]) -> T:
    """Bring a journal to the present format, run `work` in the same transaction, seal the resulting
    content, and start a new mark."""
    with closing(connect_journal(path)) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute(PICTURES)
        db.execute(TEACHER_SCORES)
        db.execute(VERDICTS)
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (SCHEMA_VERSION,))
        result = work(db)
        now = current_position(db, reseal_tables(db))
        db.execute("COMMIT")
    mark.reset_to(now)
    return result


def _report_findings(journal: Journal, found: CheckedJournal) -> None:
    """Report problems that were found and worked around."""
    report = journal.incidents.report_incident
    if found.damaged:
        report("corrupt_record", DAMAGED, sorted({key.group_id for key in found.damaged}))
    if found.bad_mark:
        text = (
            "the journal's mark was damaged and has been recreated: nothing that checkpoints or"
            " metrics record is missing, but newer work may be"
        )
        report("damaged_mark", text, found.bad_mark)
    if found.cut_short:
        _log.warning(
            "the journal is too large to be read whole at a start: the rest is compared when it is"
            " used",
            path=str(journal.path),
        )
