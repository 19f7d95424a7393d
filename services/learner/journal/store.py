"""What the learner must not forget, in one SQLite file under the run's folder.

Every write is durable when it returns. One process at a time holds the journal of a run;
each start begins a new run epoch.
"""

import asyncio
import fcntl
import json
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

from services.learner.journal.attempts import AttemptTables
from services.learner.journal.results import ResultTables
from services.learner.journal.schema import SCHEMA_VERSION, TABLES
from services.learner.journal.steps import StepTables
from services.learner.journal.writer import JournalError, connect

FILE_NAME = "journal.sqlite"


class Journal(AttemptTables, StepTables, ResultTables):
    """The journal of one run. Use `open_journal`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        super().__init__(path)
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
    """Open or create the journal of a run. Raises JournalError when it is held or foreign."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE_NAME
    lock = open(run_dir / "journal.lock", "w")  # noqa: SIM115 - held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise JournalError(
            f"another learner works on {run_dir}; stop it, or give this run another folder"
        ) from None
    try:
        _prepare(path)
    except JournalError:
        lock.close()
        raise
    return Journal(path, lock)


@contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """The journal of a run that runs or has ended, for programs that only look.

    Raises JournalError when it is missing, no journal, or one of another schema.
    """
    try:
        with closing(connect(path, read_only=True)) as db:
            _check_schema(path, _schema_version(db))
            yield db
    except sqlite3.Error as error:
        raise JournalError(f"{path} cannot be read as a journal: {error}") from error


def _prepare(path: Path) -> None:
    """Make the tables of a new journal; what is of another schema is left as it is."""
    try:
        with closing(connect(path)) as db:
            found = _schema_version(db)
            if found is None:
                db.executescript(TABLES)
                db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (SCHEMA_VERSION,))
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path} is not a journal: {error}") from None
    _check_schema(path, found)


def _check_schema(path: Path, found: str | None) -> None:
    if found not in (None, SCHEMA_VERSION):
        raise JournalError(
            f"{path} has schema {found}, this learner reads and writes {SCHEMA_VERSION}: go on with"
            " the version of the program that began the run, or start a new run"
        )


def _schema_version(db: sqlite3.Connection) -> str | None:
    """None before there is one: the file is new, or its maker was killed."""
    known = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    sql = "SELECT value FROM meta WHERE key = 'schema_version'"
    found = db.execute(sql).fetchone() if known else None
    return str(found[0]) if found else None
