"""Tables of the front door's journal."""

import sqlite3
from pathlib import Path

from flotilla_common.files.table_dump import dump_command
from flotilla_common.process.own_version import own_version
from flotilla_common.run_folder.journal_file import connect_journal

STORE_FILE = "tinker.sqlite"
SCHEMA_VERSION = 2

# Times are seconds since the epoch.
#
# orders.place: the model, or for samples what they sample from. orders.seq_id: the client's number
# at this place; -1 unloads a model. orders.operation: the front's number of an operation that
# changed the model. orders.state: `open`, `done`, or `gone` when its result was dropped. A row is
# kept for ever: it answers repeated orders.
#
# refused: numbers of a model's orders that were refused when they came, and for which no later one
# waits.
#
# models.numbering: what to subtract from an operation's number for the trainer, which begins anew
# when it holds the model again.
_SCHEMA = """
CREATE TABLE sessions (
  session_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, facts_json TEXT NOT NULL,
  created_s REAL NOT NULL, ended_s REAL
);
CREATE TABLE models (
  model_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, tenant TEXT NOT NULL,
  settings_json TEXT NOT NULL, created_s REAL NOT NULL, ended_s REAL,
  next_seq INTEGER NOT NULL DEFAULT 0, operations INTEGER NOT NULL DEFAULT 0,
  updates INTEGER NOT NULL DEFAULT 0, numbering INTEGER NOT NULL DEFAULT 0,
  recovery_folder TEXT, recovery_operation INTEGER NOT NULL DEFAULT 0,
  recovery_updates INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE refused (
  model_id TEXT NOT NULL, seq_id INTEGER NOT NULL, PRIMARY KEY (model_id, seq_id)
);
CREATE TABLE weights (
  weights_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session_id TEXT, label TEXT NOT NULL,
  folder TEXT, whole INTEGER NOT NULL, size_bytes INTEGER NOT NULL
);
CREATE TABLE samplers (
  sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, tenant TEXT NOT NULL,
  base_model TEXT NOT NULL, model_path TEXT, weights_id TEXT NOT NULL
);
CREATE TABLE checkpoints (
  path TEXT PRIMARY KEY, model_id TEXT NOT NULL, tenant TEXT NOT NULL, kind TEXT NOT NULL,
  folder TEXT NOT NULL, label TEXT NOT NULL, settings_json TEXT NOT NULL,
  created_s REAL NOT NULL, size_bytes INTEGER NOT NULL, expires_s REAL
);
CREATE TABLE orders (
  number INTEGER PRIMARY KEY, request_id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
  tenant TEXT NOT NULL, session_id TEXT NOT NULL, place TEXT NOT NULL, seq_id INTEGER NOT NULL,
  digest BLOB NOT NULL, facts_json TEXT NOT NULL, size INTEGER NOT NULL, accepted_s REAL NOT NULL,
  state TEXT NOT NULL DEFAULT 'open', operation INTEGER, result_size INTEGER NOT NULL DEFAULT 0,
  done_s REAL, delivered_s REAL, UNIQUE (place, seq_id)
);
CREATE INDEX open_orders ON orders (number) WHERE state = 'open';
CREATE INDEX kept_results ON orders (done_s, result_size) WHERE state = 'done';
CREATE INDEX delivered_results ON orders (delivered_s)
  WHERE state = 'done' AND delivered_s IS NOT NULL;
CREATE INDEX orders_of_sessions ON orders (session_id) WHERE operation IS NOT NULL;
CREATE INDEX operations ON orders (place, operation) WHERE operation IS NOT NULL;
CREATE TABLE bodies (number INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE results (
  number INTEGER PRIMARY KEY, category TEXT, content_type TEXT NOT NULL,
  headers_json TEXT NOT NULL, body BLOB NOT NULL
)
"""


class StoreError(Exception):
    """The journal could not be opened or written; later writes are not acknowledged."""


def open_store_file(path: Path) -> sqlite3.Connection:
    """Open or create the journal; may be used by any one thread at a time. Raises StoreError."""
    try:
        db = connect_journal(path, any_thread=True)
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be opened: {error}") from error
    try:
        _prepare_schema(db, path)
    except sqlite3.Error as error:
        db.close()
        raise StoreError(f"{path} is no journal, or is damaged: {error}") from error
    except BaseException:
        db.close()
        raise
    db.row_factory = sqlite3.Row
    return db


def _prepare_schema(db: sqlite3.Connection, path: Path) -> None:
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    if found == SCHEMA_VERSION:
        return
    if found:
        raise StoreError(
            f"{path} has format {found}, but {own_version()} reads and writes format"
            f" {SCHEMA_VERSION}. Use the flotilla that wrote it, or another folder."
            f" {dump_command(path)} prints all that it holds"
        )
    db.execute("BEGIN IMMEDIATE")
    with db:
        for statement in _SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
