"""Tables of the ledger, and the migration of older ledgers to the current version."""

import sqlite3

SCHEMA_VERSION = 5

_BASE = """
CREATE TABLE IF NOT EXISTS runs (
  run_id TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT NOT NULL, mode TEXT NOT NULL,
  spec_json TEXT NOT NULL, error TEXT NOT NULL, wanted_json TEXT NOT NULL,
  metrics_json TEXT NOT NULL DEFAULT '{}', created REAL NOT NULL, ended REAL,
  next_event INTEGER NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS replicas (
  run_id TEXT NOT NULL, service TEXT NOT NULL, replica INTEGER NOT NULL, state TEXT NOT NULL,
  phase TEXT NOT NULL, address TEXT NOT NULL, restarts INTEGER NOT NULL,
  unit TEXT, pid INTEGER, started REAL,
  PRIMARY KEY (run_id, service, replica)
);
CREATE TABLE IF NOT EXISTS events (
  run_id TEXT NOT NULL, event INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL,
  body TEXT NOT NULL, PRIMARY KEY (run_id, event)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
  request_id TEXT PRIMARY KEY, digest TEXT NOT NULL, run_id TEXT NOT NULL
);
"""
# Migration from version 1, which had no version number, to 2.
_SECOND = """
ALTER TABLE runs ADD COLUMN backend TEXT NOT NULL DEFAULT 'local';
ALTER TABLE runs ADD COLUMN outcome TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN drain_by REAL NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN cleanup TEXT NOT NULL DEFAULT 'pending';
ALTER TABLE runs ADD COLUMN cleanup_detail TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN cleanings INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN clean_at REAL NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN clean_by REAL NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN unreachable TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN cost_json TEXT NOT NULL DEFAULT '{}';
ALTER TABLE runs ADD COLUMN prices_json TEXT NOT NULL DEFAULT '{}';
ALTER TABLE runs ADD COLUMN metered REAL NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN begun REAL NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN registry TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN told INTEGER NOT NULL DEFAULT 0;
ALTER TABLE replicas ADD COLUMN ref TEXT NOT NULL DEFAULT '';
ALTER TABLE replicas ADD COLUMN failures_json TEXT NOT NULL DEFAULT '[]';
ALTER TABLE replicas ADD COLUMN attempt INTEGER NOT NULL DEFAULT 1;
ALTER TABLE replicas ADD COLUMN due REAL NOT NULL DEFAULT 0;
UPDATE runs SET begun = created, told = next_event - 1;
UPDATE runs SET outcome = state WHERE state IN ('completed', 'failed', 'stopped');
UPDATE runs SET cleanup = 'verified' WHERE outcome != '';
CREATE TABLE transitions (
  number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, time REAL NOT NULL, subject TEXT NOT NULL,
  old TEXT NOT NULL, new TEXT NOT NULL, cause TEXT NOT NULL
);
CREATE INDEX transitions_of_run ON transitions (run_id);
CREATE TABLE operations (
  number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
  state TEXT NOT NULL, arguments_json TEXT NOT NULL, detail TEXT NOT NULL,
  created REAL NOT NULL, changed REAL NOT NULL
);
CREATE INDEX operations_of_run ON operations (run_id, name);
"""
_THIRD = """
ALTER TABLE replicas ADD COLUMN setups INTEGER NOT NULL DEFAULT 0;
"""
_FOURTH = """
ALTER TABLE replicas ADD COLUMN price REAL;
"""
# Until version 4, alarms were metrics and messages without a cause.
_FIFTH = """
ALTER TABLE runs ADD COLUMN alarms_json TEXT NOT NULL DEFAULT '[]';
ALTER TABLE runs ADD COLUMN step INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN total_steps INTEGER NOT NULL DEFAULT 0;
ALTER TABLE replicas ADD COLUMN metrics_address TEXT NOT NULL DEFAULT '';
UPDATE events SET kind = 'message' WHERE kind = 'alarm';
DROP TABLE IF EXISTS raised_alarms;
UPDATE runs SET metrics_json = (
  SELECT json_group_object(key, value) FROM json_each(metrics_json)
  WHERE key NOT LIKE 'alarms/%/%'
);
"""
# Migrations to the current version by the found version; 0: a new ledger, or version 1.
_STEPS = {
    0: f"{_BASE}{_SECOND}{_THIRD}{_FOURTH}{_FIFTH}",
    2: f"{_THIRD}{_FOURTH}{_FIFTH}",
    3: f"{_FOURTH}{_FIFTH}",
    4: _FIFTH,
}


class LedgerError(Exception):
    """The ledger cannot be used; the message states the cause and the fix."""


def prepare_schema(db: sqlite3.Connection, path: str) -> None:
    """Create the tables, or migrate those of an older ledger to the current version. Raises
    LedgerError."""
    found = _read_version(db)
    if found == SCHEMA_VERSION:
        return
    _refuse_unknown(found, path)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have migrated it in the meantime.
        if (found := _read_version(db)) != SCHEMA_VERSION:
            for statement in _STEPS[found].split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _read_version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _refuse_unknown(found: int, path: str) -> None:
    if found not in _STEPS:
        raise LedgerError(
            f"{path} is a ledger of version {found}, but this flotilla supports version"
            f" {SCHEMA_VERSION}: use the flotilla that wrote it, or another --runs folder"
        )
