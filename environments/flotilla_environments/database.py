"""SQLite databases of an instance: building a seed, and running statements from outside."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_environments.app import Row, Scenario

FACTS_SCHEMA = "create table task_facts(name text primary key, value text not null);"
MAX_QUERY_STEPS = 5_000_000  # virtual machine instructions, about a tenth of a second
MAX_QUERY_ROWS = 100_000
MAX_VALUE_BYTES = 16 * 2**20
_STEPS_PER_CHECK = 10_000

_READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_WRITES = {
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_TRANSACTION,
}
_PRAGMAS = {"table_info", "table_list", "foreign_key_list", "index_list"}


@dataclass(frozen=True)
class Rows:
    """Result of a statement; `columns` is empty for one that returns no rows."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    rows_affected: int = 0
    last_insert_id: int | None = None


def build_seed(schema: str, of: Scenario) -> bytes:
    """Return a scenario's tables, and `task_facts` for its verifier, as bytes of a SQLite file."""
    facts: list[Row] = [{"name": name, "value": str(value)} for name, value in of.facts.items()]
    return database_bytes(schema + FACTS_SCHEMA, {**of.tables, "task_facts": facts})


def database_bytes(schema: str, tables: Mapping[str, Sequence[Row]]) -> bytes:
    """Return a SQLite file; all rows of a table have the same columns."""
    db = sqlite3.connect(":memory:")
    try:
        db.executescript(schema)
        for table, rows in tables.items():
            if not rows:
                continue
            columns = ", ".join(rows[0])
            marks = ", ".join("?" * len(rows[0]))
            db.executemany(
                f"insert into {table}({columns}) values ({marks})",
                [tuple(row.values()) for row in rows],
            )
        db.commit()
        return db.serialize()
    finally:
        db.close()


def open_database(content: bytes) -> sqlite3.Connection:
    """Open a private in-memory copy of a SQLite file."""
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.deserialize(content)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    return db


def run_query(db: sqlite3.Connection, sql: str, args: Sequence[Any], *, read_only: bool) -> Rows:
    """Run one statement that may only read, or read and write rows: no files, no schema changes.

    Raises `sqlite3.Error` for any fault, including more than `MAX_QUERY_STEPS` or
    `MAX_QUERY_ROWS`.
    """
    allowed = _READS if read_only else _READS | _WRITES

    def authorize(action: int, first: str | None, *_: str | None) -> int:
        harmless = action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS
        return sqlite3.SQLITE_OK if action in allowed or harmless else sqlite3.SQLITE_DENY

    checks_left = MAX_QUERY_STEPS // _STEPS_PER_CHECK

    def exhausted() -> bool:
        nonlocal checks_left
        checks_left -= 1
        return checks_left < 0

    db.set_authorizer(authorize)
    db.set_progress_handler(exhausted, _STEPS_PER_CHECK)
    try:
        with db:
            return _fetch_rows(db.execute(sql, args))
    except (sqlite3.Warning, OverflowError, ValueError) as error:
        # Two statements in one, a number beyond 64 bits, text that is not Unicode.
        raise sqlite3.ProgrammingError(str(error)) from error
    finally:
        db.set_authorizer(None)
        db.set_progress_handler(None, 0)


def _fetch_rows(cursor: sqlite3.Cursor) -> Rows:
    if cursor.description is None:
        return Rows([], [], cursor.rowcount, cursor.lastrowid)
    rows = cursor.fetchmany(MAX_QUERY_ROWS + 1)
    if len(rows) > MAX_QUERY_ROWS:
        raise sqlite3.DataError(f"more than {MAX_QUERY_ROWS} rows: add a limit")
    return Rows([column[0] for column in cursor.description], rows)
