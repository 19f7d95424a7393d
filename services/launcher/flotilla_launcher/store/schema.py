"""Tables of the ledger."""

import sqlite3
from pathlib import Path

from flotilla_common.files.table_dump import dump_command
from flotilla_common.process.own_version import own_version
from flotilla_launcher.store.write_transaction import write_transaction

SCHEMA_VERSION = 8
# Their runs count no tokens, and the first has one more table, which nothing reads. Their writers
# would drop the tokens of a run, so a ledger that was opened here is no longer theirs.
_FORMER = (6, 7)

# `run_json` and `replica_json` hold the Run without its replicas, and one Replica.
_SCHEMA = """
CREATE TABLE runs (
  run_id TEXT PRIMARY KEY, run_json TEXT NOT NULL, spec_json TEXT NOT NULL,
  prices_json TEXT NOT NULL, registry TEXT NOT NULL DEFAULT '',
  created REAL NOT NULL, begun REAL NOT NULL, ended REAL,
  metrics_json TEXT NOT NULL DEFAULT '{}', alarms_json TEXT NOT NULL DEFAULT '[]',
  step INTEGER NOT NULL DEFAULT 0, total_steps INTEGER NOT NULL DEFAULT 0,
  next_event INTEGER NOT NULL DEFAULT 1, told INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE replicas (
  run_id TEXT NOT NULL, service TEXT NOT NULL, replica INTEGER NOT NULL,
  replica_json TEXT NOT NULL, PRIMARY KEY (run_id, service, replica)
);
CREATE TABLE events (
  run_id TEXT NOT NULL, event INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL,
  body TEXT NOT NULL, PRIMARY KEY (run_id, event)
) WITHOUT ROWID;
CREATE TABLE requests (
  request_id TEXT PRIMARY KEY, digest TEXT NOT NULL, run_id TEXT NOT NULL
);
CREATE TABLE operations (
  number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
  state TEXT NOT NULL, arguments_json TEXT NOT NULL, detail TEXT NOT NULL,
  created REAL NOT NULL, changed REAL NOT NULL
);
CREATE INDEX operations_of_run ON operations (run_id, name);
"""


class LedgerError(Exception):
    """The ledger cannot be used; the message states the cause and the fix."""


def open_ledger(path: Path) -> sqlite3.Connection:
    """Open or create a ledger. Raises LedgerError."""
    try:
        db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be opened: {error}") from error
    try:
        prepare_schema(db, str(path))
        db.execute("PRAGMA synchronous=FULL")
    except sqlite3.Error as error:
        db.close()
        raise LedgerError(
            f"{path} is not a ledger, is damaged, or cannot be written: {error}"
        ) from error
    except BaseException:
        db.close()
        raise
    return db


def prepare_schema(db: sqlite3.Connection, path: str) -> None:
    """Create the tables of a new ledger, and take over one of a former version. Raises LedgerError
    for one of another version."""
    if _has_tables(db, path):
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return
    db.execute("PRAGMA journal_mode=WAL")
    with write_transaction(db):
        # Another process may have created them in the meantime.
        if not _has_tables(db, path):
            for statement in _SCHEMA.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _has_tables(db: sqlite3.Connection, path: str) -> bool:
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    if found not in (0, *_FORMER, SCHEMA_VERSION):
        raise LedgerError(
            f"{path} has format {found}, but {own_version()} reads and writes format"
            f" {SCHEMA_VERSION}. Use the flotilla that wrote it, or another --runs folder."
            f" {dump_command(path)} prints all that it holds"
        )
    return found != 0
