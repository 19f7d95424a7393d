"""A database that is built again from its rows answers as the original, or not at all."""

import sqlite3

import pytest

from services.env_gateway.adapters import database_dump as dump

TABLES = "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT);INSERT INTO items VALUES (1, 'a');"


def rebuilt(script: str) -> sqlite3.Connection | None:
    source = sqlite3.connect(":memory:")
    source.executescript(script)
    schema = dump.parse_schema(source.execute(dump.SCHEMA_SQL).fetchall())
    if schema is None:
        return None
    rows = source.execute(dump.dump_sql(schema)).fetchall()
    assert dump.matches(schema, rows)
    content = dump.rebuild(schema, rows)
    if content is None:
        return None
    copy = sqlite3.connect(":memory:")
    copy.deserialize(content)
    return copy


def test_rows_and_types_are_those_of_the_original() -> None:
    copy = rebuilt(
        TABLES + "CREATE TABLE log (at REAL, what BLOB);INSERT INTO log VALUES (1, x'00');"
    )
    assert copy is not None
    assert copy.execute("SELECT rowid, at, what FROM log").fetchall() == [(1, 1.0, b"\0")]
    assert copy.execute("SELECT * FROM items").fetchall() == [(1, "a")]


@pytest.mark.parametrize(
    "more",
    [
        "CREATE VIEW named AS SELECT name FROM items;",
        "CREATE VIRTUAL TABLE words USING fts5(word);",
    ],
)
def test_what_a_copy_would_lack_is_left_to_the_original(more: str) -> None:
    assert rebuilt(TABLES + more) is None
