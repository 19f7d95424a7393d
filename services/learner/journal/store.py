"""What the learner must not forget, in one SQLite file under the run's folder.

Every write is durable when it returns. One process at a time holds the journal of a run;
each start begins a new run epoch.
"""

import asyncio
import fcntl
import json
import sqlite3
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from services.common.log import get_logger
from services.learner.journal.attempts import AttemptTables
from services.learner.journal.checkpoint_tables import ResultTables
from services.learner.journal.connection import JournalError, connect
from services.learner.journal.progress_mark import FILE_NAME as MARK
from services.learner.journal.progress_mark import Mark
from services.learner.journal.quarantine import DAMAGED, put_in_quarantine
from services.learner.journal.schema import FILE_NAME, SCHEMA_VERSION, TABLES
from services.learner.journal.seal import position, seal_anew
from services.learner.journal.startup_check import Found, check, check_schema, schema_version
from services.learner.journal.step_tables import StepTables
from services.learner.types import AttemptKey

T = TypeVar("T")

LOCK = "journal.lock"
_log = get_logger(__name__)


class Journal(AttemptTables, StepTables, ResultTables):
    """The journal of one run. Use `open_journal`."""

    def __init__(self, path: Path, mark: Mark, lock: IO[str]) -> None:
        super().__init__(path, mark)
        self._lock = lock

    async def close(self) -> None:
        """Finish all writes and let another process have the run."""
        await asyncio.to_thread(self._writer.close)
        self._lock.close()

    async def broken(self) -> None:
        """Wait until the disk refuses a write; raises the JournalError. Nothing is acknowledged
        from then on, so whoever waits for trajectories would wait for ever."""
        await asyncio.wrap_future(self._writer.broken)

    async def set_meta(self, values: Mapping[str, object]) -> None:
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        await self.write(
            lambda db: db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        )

    async def meta(self) -> dict[str, Any]:
        rows = await self.read(lambda db: db.execute("SELECT key, value FROM meta").fetchall())
        return {key: json.loads(value) for key, value in rows}


def open_journal(run_dir: Path) -> Journal:
    """Open or create the journal of a run; reads all of it but the arrays.

    Raises JournalError when it is held or foreign, and the LostPastError that says what is missing
    when it is not all that the run has acknowledged.
    """
    lock = hold(run_dir)
    try:
        found = check(run_dir)
        path, mark = run_dir / FILE_NAME, Mark(run_dir / MARK)
        if found.position is None:
            create(path, mark, lambda db: None)
        elif found.damaged:
            write_anew(path, mark, lambda db: _quarantine(db, found.damaged))
        elif found.new_mark:
            mark.begin(found.position)
        journal = Journal(path, mark, lock)
    except BaseException:
        lock.close()
        raise
    _tell(journal, found)
    return journal


def hold(run_dir: Path) -> IO[str]:
    """Keep all other programs from writing to a journal, until what is returned is closed.

    Raises JournalError when one writes to it now.
    """
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


def create(path: Path, mark: Mark, work: Callable[[sqlite3.Connection], T]) -> T:
    """Make the tables of a new journal, run `work` in its first transaction, begin its mark."""

    def begin(db: sqlite3.Connection) -> T:
        db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (SCHEMA_VERSION,))
        return work(db)

    try:
        with closing(connect(path)) as db:
            db.executescript(TABLES)
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path} is not a journal: {error}") from None
    return write_anew(path, mark, begin)


def write_anew(path: Path, mark: Mark, work: Callable[[sqlite3.Connection], T]) -> T:
    """Run `work` in a transaction, seal all that the journal holds then, and begin a new mark."""
    with closing(connect(path)) as db:
        db.execute("BEGIN IMMEDIATE")
        result = work(db)
        now = position(db, seal_anew(db))
        db.execute("COMMIT")
    mark.begin(now)
    return result


@contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """The journal of a run that runs or has ended, for programs that only look.

    Raises JournalError when it is missing, no journal, or one of another schema.
    """
    try:
        with closing(connect(path, read_only=True)) as db:
            check_schema(path, schema_version(db))
            yield db
    except sqlite3.Error as error:
        raise JournalError(f"{path} cannot be read as a journal: {error}") from error


def _quarantine(db: sqlite3.Connection, keys: Sequence[AttemptKey]) -> None:
    put_in_quarantine(db, keys, sorted({key.group_id for key in keys}))


def _tell(journal: Journal, found: Found) -> None:
    """Say what was found and worked around."""
    report = journal.incidents.report
    if found.damaged:
        report("corrupt_record", DAMAGED, sorted({key.group_id for key in found.damaged}))
    if found.bad_mark:
        text = (
            "the journal's mark is not what was written, and was made anew: nothing is missing that"
            " checkpoints and metrics know of, what they do not know of could be"
        )
        report("damaged_mark", text, found.bad_mark)
    if found.cut_short:
        _log.warning(
            "the journal is too large to be read whole at a start: the rest is compared when it is"
            " used",
            path=str(journal.path),
        )
