"""The journal's file: its name and format, connections to it, and their errors."""

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from flotilla_common.files.table_dump import dump_command
from flotilla_common.process.own_version import own_version

JOURNAL_FILE = "journal.sqlite"
SCHEMA_VERSION = "9"
# Formats that are read; a learner that opens one brings it to the present one.
READ_VERSIONS = ("6", "7", "8", SCHEMA_VERSION)
# Locked by the learner that writes the journal.
LOCK = "journal.lock"
# Key in the journal's meta: what the run started with, by name, as JSON.
BEGAN_WITH = "began_with"


class JournalError(Exception):
    """The journal could not be opened or written; later writes are not acknowledged."""


def connect_journal(
    path: Path, *, read_only: bool = False, any_thread: bool = False
) -> sqlite3.Connection:
    """Open a connection whose commits are on disk when they return; with `any_thread` another
    thread than this one may use it."""
    uri = f"{path.absolute().as_uri()}{'?mode=ro' if read_only else ''}"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=30, check_same_thread=not any_thread
    )
    if not read_only:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    return connection


@contextmanager
def open_read_only(path: Path) -> Generator[sqlite3.Connection]:
    """Open the journal of a running or finished run for reading only.

    Raises JournalError if it is missing, not a journal, or one of another schema."""
    try:
        with closing(connect_journal(path, read_only=True)) as db:
            check_schema(path, schema_version(db))
            yield db
    except sqlite3.Error as error:
        raise JournalError(f"{path} cannot be read as a journal: {error}") from error


def check_schema(path: Path, found: str | None) -> None:
    """Raise JournalError for a schema that this program does not read."""
    if found not in (None, *READ_VERSIONS):
        raise JournalError(
            f"{path} has format {found}, but {own_version()} reads and writes format"
            f" {SCHEMA_VERSION}. Use the flotilla that wrote it, or start a new run."
            f" {dump_command(path)} prints all that it holds"
        )


def schema_version(db: sqlite3.Connection) -> str | None:
    """Return the schema's version; None if there is none, because the file is new or the process
    that created it was killed."""
    known = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    sql = "SELECT value FROM meta WHERE key = 'schema_version'"
    found = db.execute(sql).fetchone() if known else None
    return str(found[0]) if found else None
