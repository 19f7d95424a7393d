"""Read and write rows by column name."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.seed.accounts import SIGNED_IN
from flotilla_environments.toolkit import ToolError

MAX_PATTERN = 200


def select_rows(db: sqlite3.Connection, sql: str, args: Sequence[Any] = ()) -> list[Row]:
    cursor = db.execute(sql, args)
    columns = [column[0] for column in cursor.description]
    return [dict(zip(columns, row, strict=True)) for row in cursor]


def select_first(db: sqlite3.Connection, sql: str, args: Sequence[Any] = ()) -> Row | None:
    return next(iter(select_rows(db, sql, args)), None)


def require_row(db: sqlite3.Connection, table: str, row_id: int, *, own: bool = False) -> Row:
    """Return the row with an id, of the signed-in user where `own`. Raises `ToolError` for none."""
    row = select_first(db, f"select * from {table} where id = ?", (row_id,))
    if row is None or (own and row["user_id"] != SIGNED_IN):
        raise ToolError(f"{table.removesuffix('s').replace('_', ' ')} {row_id} not found")
    return row


def insert_row(db: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> int:
    """Insert a row and return its id."""
    marks = ", ".join("?" * len(row))
    sql = f"insert into {table}({', '.join(row)}) values ({marks})"
    row_id = db.execute(sql, tuple(row.values())).lastrowid
    assert row_id is not None
    return row_id


def update_row(db: sqlite3.Connection, table: str, row_id: int, changes: Mapping[str, Any]) -> None:
    marks = ", ".join(f"{column} = ?" for column in changes)
    db.execute(f"update {table} set {marks} where id = ?", (*changes.values(), row_id))


def like_pattern(text: str) -> str:
    """Make a pattern of `like`. Raises `ToolError` for a text longer than any name."""
    if len(text) > MAX_PATTERN:
        raise ToolError(f"search for at most {MAX_PATTERN} characters")
    return f"%{text}%"


def omit_columns(row: Row, *columns: str) -> Row:
    return {name: value for name, value in row.items() if name not in columns}
