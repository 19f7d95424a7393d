"""A database read whole by one statement, and built again from its rows. Pure.

A verifier asks a database dozens of small questions. Over HTTP each costs a request, so where a
database is small all of it is fetched at once: one UNION ALL over its tables, padded to the same
width, with the schema in front of it to show whether the tables are still those assumed.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_ROWS = 20_000
SCHEMA_SQL = (
    "SELECT name, sql FROM sqlite_master "
    "WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
)


@dataclass(frozen=True)
class Table:
    name: str
    sql: str
    columns: tuple[str, ...]


Schema = tuple[Table, ...]


def parse_schema(rows: Sequence[Sequence[Any]]) -> Schema | None:
    """Tables from the rows of SCHEMA_SQL; None when one is of an unusual kind, or a view. Where no
    primary key says which row is which, the rowid is kept with the columns."""
    database = sqlite3.connect(":memory:")
    try:
        tables: list[Table] = []
        for name, sql in rows:
            database.execute(sql)
            info = database.execute(f"PRAGMA table_info({_quoted(name)})").fetchall()
            columns = tuple(column[1] for column in info)
            keyed = any(column[5] for column in info)
            tables.append(Table(name, sql, columns if keyed else ("rowid", *columns)))
        views = database.execute("SELECT 1 FROM sqlite_master WHERE type = 'view'").fetchall()
        return None if views else tuple(tables)
    except sqlite3.Error:
        # Virtual tables of an extension that is not here, for example.
        return None
    finally:
        database.close()


def dump_sql(schema: Schema) -> str:
    width = max((len(table.columns) for table in schema), default=0) + 1
    width = max(width, 3)
    master = _select("'' AS t", ["name", "sql"], width)
    parts = [f"{master} FROM ({SCHEMA_SQL})"]
    for table in schema:
        columns = [_quoted(column) for column in table.columns]
        literal = "'" + table.name.replace("'", "''") + "'"
        parts.append(f"{_select(literal, columns, width)} FROM {_quoted(table.name)}")
    return f"SELECT * FROM ({' UNION ALL '.join(parts)}) LIMIT {MAX_ROWS + 1}"


def matches(schema: Schema, rows: Sequence[Sequence[Any]]) -> bool:
    """Whether a dump was made with the schema that the database has."""
    found = {row[1]: row[2] for row in rows if row[0] == ""}
    return found == {table.name: table.sql for table in schema}


def rebuild(schema: Schema, rows: Sequence[Sequence[Any]]) -> bytes | None:
    """The database as a SQLite file; None when it is too large or of an unusual kind."""
    if len(rows) > MAX_ROWS:
        return None
    by_table: dict[str, list[Sequence[Any]]] = {table.name: [] for table in schema}
    for row in rows:
        if row[0] != "":
            by_table[row[0]].append(row)
    database = sqlite3.connect(":memory:")
    try:
        for table in schema:
            database.execute(table.sql)
            columns = ", ".join(map(_quoted, table.columns))
            marks = ", ".join("?" * len(table.columns))
            end = len(table.columns) + 1
            database.executemany(
                f"INSERT INTO {_quoted(table.name)} ({columns}) VALUES ({marks})",
                [row[1:end] for row in by_table[table.name]],
            )
        database.commit()
        return database.serialize()
    except sqlite3.Error:
        # Virtual tables, generated columns: the verifier asks the environment itself instead.
        return None
    finally:
        database.close()


def _select(first: str, columns: Sequence[str], width: int) -> str:
    padding = ["NULL"] * (width - 1 - len(columns))
    return "SELECT " + ", ".join([first, *columns, *padding])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
