"""A database rebuilt from its rows answers like the original, or not at all."""

import sqlite3

import pytest

from flotilla_env_gateway.adapters import database_dump as dump

TABLES = "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT);INSERT INTO items VALUES (1, 'a');"


def rebuilt(script: str) -> sqlite3.Connection:
    source = sqlite3.connect(":memory:")
    source.executescript(script)
    schema = dump.parse_schema(source.execute(dump.SCHEMA_SQL).fetchall())
    content = dump.rebuild_database(schema, source.execute(dump.build_dump_sql(schema)).fetchall())
    assert content is not None
    copy = sqlite3.connect(":memory:")
    copy.deserialize(content)
    return copy


def test_rows_and_types_are_those_of_the_original() -> None:
    copy = rebuilt(
        TABLES + "CREATE TABLE log (at REAL, what BLOB);INSERT INTO log VALUES (1, x'00');"
    )
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
    with pytest.raises(dump.DumpRefusedError):
        rebuilt(TABLES + more)


def test_a_dump_of_other_tables_than_those_assumed_is_none() -> None:
    schema = dump.parse_schema([("items", "CREATE TABLE items (id INTEGER PRIMARY KEY)")])
    assert (
        dump.rebuild_database(schema, [("", "items", "CREATE TABLE items (id)"), ("items", 1)])
        is None
    )
