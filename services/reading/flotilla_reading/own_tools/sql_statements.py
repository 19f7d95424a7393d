"""Statements of SQL on tables that are known. Pure."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_reading.own_tools.values import NOUNS, is_harmless, make_name

_SQL = re.compile(r"\bSQL\b|\bSELECT\b|\bINSERT\b|CREATE TABLE", re.IGNORECASE)
_NAMES = re.compile(r"query|sql|statement", re.IGNORECASE)
_IDENTIFIER = re.compile(r"[A-Za-z]\w{0,40}")


@dataclass(frozen=True, slots=True)
class SqlTable:
    """A table: its columns, which of them hold numbers, and some of its rows."""

    name: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[Any, ...], ...]

    @property
    def is_plain(self) -> bool:
        """Whether its names can be written without quotes."""
        return all(_IDENTIFIER.fullmatch(name) for name in (self.name, *self.columns))


def takes_sql(name: str, description: str) -> bool:
    return _NAMES.search(name) is not None and _SQL.search(description) is not None


def draw_statement(
    rng: random.Random, tables: Sequence[SqlTable], description: str
) -> tuple[str, str | None]:
    """Return a statement of the kind that a parameter's description names, and the name of the
    table that it creates."""
    plain = [table for table in tables if table.is_plain and table.columns]
    if "CREATE TABLE" in description.upper() or not plain:
        name, first, second = rng.sample(NOUNS, 3)
        return f"CREATE TABLE {name}s ({first} TEXT, {second} INTEGER)", f"{name}s"
    table = rng.choice(plain)
    if re.match(r"\s*SELECT\b", description, re.IGNORECASE):
        return f"SELECT * FROM {table.name}", None
    return _draw_change(rng, table), None


def _draw_change(rng: random.Random, table: SqlTable) -> str:
    kind = rng.choice(("insert", "insert", "update", "delete"))
    rows = [row for row in table.rows if _is_writable(row[0])]
    if kind == "insert" or not rows:
        values = ", ".join(_draw_value(rng, is_number) for is_number in table.numeric)
        return f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({values})"
    where = f"WHERE {table.columns[0]} = {_write(rng.choice(rows)[0])}"
    if kind == "delete" or len(table.columns) < 2:
        return f"DELETE FROM {table.name} {where}"
    number = rng.randrange(1, len(table.columns))
    value = _draw_value(rng, table.numeric[number])
    return f"UPDATE {table.name} SET {table.columns[number]} = {value} {where}"


def _draw_value(rng: random.Random, is_number: bool) -> str:
    return str(rng.randrange(1, 100)) if is_number else _write(make_name(rng))


def _is_writable(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and is_harmless(value))


def _write(value: Any) -> str:
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"
