"""Dump of a whole database by one statement, and its rebuilding from the rows. Pure.

A verifier sends a database dozens of small queries. Over HTTP each costs a request, so a small
database is fetched at once: one UNION ALL over its tables, padded to the same width, preceded by
the schema to show whether the tables are still the assumed ones.

The schema and the rows come from an environment, and SQL can do anything that this process can.
So only CREATE TABLE is allowed, in memory, and its expressions are never evaluated."""

import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MAX_ROWS = 20_000
# Limits of a copy.
MAX_BYTES = 16 * 2**20
SCHEMA_SQL = (
    "SELECT name, sql FROM sqlite_master "
    "WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
)
# SQLite unites at most 500 SELECTs, one of them the schema's.
_MAX_TABLES = 499
# SQLite cannot be interrupted while it parses; a longer statement could take seconds.
_MAX_STATEMENT_CHARS = 2**15
# The statement sent to the server is padded: its size is tables times columns.
_MAX_DUMP_CHARS = 2**20
_CPU_S = 2.0
_STEPS_PER_CHECK = 10_000
_PAGE_BYTES = 4096
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_BYTES,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
}
_PRAGMAS = (
    f"PRAGMA page_size = {_PAGE_BYTES}",
    f"PRAGMA max_page_count = {MAX_BYTES // _PAGE_BYTES}",
    # The rows have passed these checks in their own database.
    "PRAGMA ignore_check_constraints = ON",
    "PRAGMA trusted_schema = OFF",
)
# Names in expressions are looked up when a table is created; nothing is evaluated.
_TO_DECLARE = {
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
}
_ROWS = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE}
_TO_FILL = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_TRANSACTION}


class DumpRefusedError(Exception):
    """Refusal to copy a database; the message gives the reason."""


@dataclass(frozen=True)
class Table:
    name: str
    sql: str
    columns: tuple[str, ...]


Schema = tuple[Table, ...]


def parse_schema(rows: Sequence[Sequence[Any]]) -> Schema:
    """Parse the tables from the rows of SCHEMA_SQL. Without a primary key the rowid is kept with
    the columns. Raises DumpRefusedError if one is not an ordinary table."""
    if len(rows) > _MAX_TABLES:
        raise DumpRefusedError(f"it has more than {_MAX_TABLES} tables")
    with _open_scratch_database() as database:
        tables = [_declare_table(database, row) for row in rows]
    if len({table.name for table in tables}) < len(tables):
        raise DumpRefusedError("two of its tables have the same name")
    return tuple(tables)


def build_dump_sql(schema: Schema) -> str:
    """Return the statement that reads all tables. Raises DumpRefusedError if it is too long."""
    width = max((len(table.columns) for table in schema), default=0) + 1
    width = max(width, 3)
    master = _select_clause("'' AS t", ["name", "sql"], width)
    parts = [f"{master} FROM ({SCHEMA_SQL})"]
    for table in schema:
        columns = [_quote_name(column) for column in table.columns]
        literal = "'" + table.name.replace("'", "''") + "'"
        parts.append(f"{_select_clause(literal, columns, width)} FROM {_quote_name(table.name)}")
    if sum(map(len, parts)) > _MAX_DUMP_CHARS:
        raise DumpRefusedError(f"reading it takes more than {_MAX_DUMP_CHARS} characters of SQL")
    return f"SELECT * FROM ({' UNION ALL '.join(parts)}) LIMIT {MAX_ROWS + 1}"


def rebuild_database(schema: Schema, rows: Sequence[Sequence[Any]]) -> bytes | None:
    """Rebuild the database as a SQLite file; return None if the dump was made with another schema.
    Raises DumpRefusedError if it is too large, or not a dump."""
    if len(rows) > MAX_ROWS:
        raise DumpRefusedError(f"it has more than {MAX_ROWS} rows")
    by_table = _group_by_table(rows)
    found = [tuple(row[1:3]) for row in by_table.pop("", [])]
    if sorted(found, key=repr) != sorted(((t.name, t.sql) for t in schema), key=repr):
        return None
    with _open_scratch_database() as database:
        for table in schema:
            database.execute(table.sql)
        database.set_authorizer(_may_fill)
        for table in schema:
            _insert_rows(database, table, by_table.pop(table.name, []))
        database.commit()
        database.set_authorizer(None)
        if by_table:
            raise DumpRefusedError("it has rows of a table that is not in its schema")
        return database.serialize()


@contextmanager
def _open_scratch_database() -> Generator[sqlite3.Connection]:
    """Open a database in memory that allows declaring tables and nothing else. Raises
    DumpRefusedError for any fault of a statement or of a value."""
    database = sqlite3.connect(":memory:")
    until = time.thread_time() + _CPU_S
    try:
        for limit, value in _LIMITS.items():
            database.setlimit(limit, value)
        for pragma in _PRAGMAS:
            database.execute(pragma)
        database.set_progress_handler(lambda: time.thread_time() > until, _STEPS_PER_CHECK)
        database.set_authorizer(_may_declare)
        yield database
    except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:
        # Besides SQL errors: numbers beyond 64 bits, text that is not Unicode, lists among values.
        raise DumpRefusedError(str(error)) from error
    finally:
        database.close()


def _may_declare(action: int, first: str | None, _: str | None, db: str | None, *__: Any) -> int:
    if db not in (None, "main"):
        allowed = False
    elif action in _ROWS:
        allowed = first == "sqlite_master"
    elif action == sqlite3.SQLITE_PRAGMA:
        allowed = first == "table_xinfo"
    else:
        allowed = action in _TO_DECLARE
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _may_fill(action: int, *_: Any) -> int:
    return sqlite3.SQLITE_OK if action in _TO_FILL else sqlite3.SQLITE_DENY


def _declare_table(database: sqlite3.Connection, row: Sequence[Any]) -> Table:
    match row:
        case [str(name), str(sql)] if len(sql) <= _MAX_STATEMENT_CHARS:
            database.execute(sql)
        case [str(name), str()]:
            raise DumpRefusedError(
                f"a table is declared in more than {_MAX_STATEMENT_CHARS} characters"
            )
        case _:
            raise DumpRefusedError("its schema is not a list of names and statements")
    info = database.execute(f"PRAGMA table_xinfo({_quote_name(name)})").fetchall()
    if not info or any(column[6] for column in info):
        raise DumpRefusedError("it has something else than tables, or generated columns")
    columns = tuple(column[1] for column in info)
    keyed = any(column[5] for column in info)
    return Table(name, sql, columns if keyed else ("rowid", *columns))


def _group_by_table(rows: Sequence[Sequence[Any]]) -> dict[str, list[Sequence[Any]]]:
    """Group rows by the table named in front of each."""
    found: dict[str, list[Sequence[Any]]] = {}
    for row in rows:
        if not row or not isinstance(row[0], str):
            raise DumpRefusedError("its rows do not name their tables")
        found.setdefault(row[0], []).append(row)
    return found


def _insert_rows(database: sqlite3.Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
    columns = ", ".join(map(_quote_name, table.columns))
    marks = ", ".join("?" * len(table.columns))
    end = len(table.columns) + 1
    database.executemany(
        f"INSERT INTO {_quote_name(table.name)} ({columns}) VALUES ({marks})",
        [row[1:end] for row in rows],
    )


def _select_clause(first: str, columns: Sequence[str], width: int) -> str:
    padding = ["NULL"] * (width - 1 - len(columns))
    return "SELECT " + ", ".join([first, *columns, *padding])


def _quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
