"""What a verifier finds when it runs: Fleet's environment, databases and text helpers.

Pure Python without I/O of its own: databases are read through a function that the caller passes.
"""

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.env_gateway.verify.diff import IgnoreConfig, SnapshotDiff

TASK_SUCCESSFUL_SCORE = 1
TASK_FAILED_SCORE = 0

Row = dict[str, Any]
# (database, sql, arguments) to (columns, rows); raises StatementError.
RunQuery = Callable[[str, str, Sequence[Any]], tuple[Sequence[str], Sequence[Sequence[Any]]]]

_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))
_NUMBER = re.compile(r"-?\d+\.?\d*")
_FLEET_IMPORT = re.compile(r"^[ \t]*(from fleet\b.*? import .*|import fleet\b.*)$\n?", re.MULTILINE)
_DECORATOR = re.compile(r"^@verifier\b(\([^)]*\))?[ \t]*\n", re.MULTILINE)


class StatementError(Exception):
    """The database refused a statement."""


@dataclass(frozen=True)
class QueryResponse:
    """What `Database.query` returns, in Fleet's shape."""

    success: bool
    columns: list[str] | None = None
    rows: list[list[Any]] | None = None
    error: str | None = None
    message: str = ""


class Count(int):
    """A number of rows, with Fleet's assertions."""

    def assert_eq(self, expected: int) -> "Count":
        if self != expected:
            raise AssertionError(f"expected count {expected}, got {int(self)}")
        return self

    def assert_gt(self, threshold: int) -> "Count":
        if self <= threshold:
            raise AssertionError(f"expected count above {threshold}, got {int(self)}")
        return self

    def assert_between(self, low: int, high: int) -> "Count":
        if not low <= self <= high:
            raise AssertionError(f"expected count in [{low}, {high}], got {int(self)}")
        return self


@dataclass(frozen=True)
class Query:
    """A query under construction; each method returns a new one."""

    database: "Database"
    name: str
    columns: tuple[str, ...] = ("*",)
    conditions: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    joins: tuple[str, ...] = ()
    order: str = ""
    at_most: int | None = None

    def select(self, *columns: str) -> "Query":
        return replace(self, columns=columns or ("*",))

    def eq(self, column: str, value: Any) -> "Query":
        return self._where(f"{quoted(column)} = ?", value)

    def neq(self, column: str, value: Any) -> "Query":
        return self._where(f"{quoted(column)} != ?", value)

    def gt(self, column: str, value: Any) -> "Query":
        return self._where(f"{quoted(column)} > ?", value)

    def gte(self, column: str, value: Any) -> "Query":
        return self._where(f"{quoted(column)} >= ?", value)

    def lt(self, column: str, value: Any) -> "Query":
        return self._where(f"{quoted(column)} < ?", value)

    def lte(self, column: str, value: Any) -> "Query":
        return self._where(f"{quoted(column)} <= ?", value)

    def like(self, column: str, pattern: str) -> "Query":
        return self._where(f"{quoted(column)} LIKE ?", pattern)

    ilike = like

    def in_(self, column: str, values: Sequence[Any]) -> "Query":
        return self._where(f"{quoted(column)} IN ({_marks(values)})", *values)

    def not_in(self, column: str, values: Sequence[Any]) -> "Query":
        return self._where(f"{quoted(column)} NOT IN ({_marks(values)})", *values)

    def is_null(self, column: str) -> "Query":
        return self._where(f"{quoted(column)} IS NULL")

    def not_null(self, column: str) -> "Query":
        return self._where(f"{quoted(column)} IS NOT NULL")

    def where(self, conditions: Mapping[str, Any] | None = None, **more: Any) -> "Query":
        query = self
        for column, value in {**(conditions or {}), **more}.items():
            query = query.eq(column, value)
        return query

    def join(self, other: str, on: Mapping[str, str]) -> "Query":
        """Join on `{column of this table: column of the other}`."""
        mine, theirs = quoted(self.name), quoted(other)
        equal = [f"{mine}.{quoted(a)} = {theirs}.{quoted(b)}" for a, b in on.items()]
        clause = f"JOIN {theirs} ON {' AND '.join(equal)}"
        return replace(self, joins=(*self.joins, clause))

    def sort(self, column: str, desc: bool = False) -> "Query":
        return replace(self, order=f"{quoted(column)} {'DESC' if desc else 'ASC'}")

    def limit(self, n: int | None) -> "Query":
        return replace(self, at_most=n)

    def all(self) -> list[Row]:
        sql, args = self._compile()
        return self.database.select(sql, args)

    def first(self) -> Row | None:
        return next(iter(self.limit(1).all()), None)

    def count(self) -> Count:
        query = replace(self, columns=("COUNT(*) AS n",), order="", at_most=None)
        return Count(query.all()[0]["n"])

    def assert_exists(self) -> "Query":
        if self.first() is None:
            raise AssertionError(f"no row of {self.name!r} matches")
        return self

    def assert_none(self) -> "Query":
        if (row := self.first()) is not None:
            raise AssertionError(f"expected no row of {self.name!r} to match, found {row}")
        return self

    def assert_eq(self, column: str, value: Any) -> "Query":
        row = self.first()
        if row is None or row.get(column) != value:
            raise AssertionError(f"expected {column} = {value!r} in {self.name!r}, found {row}")
        return self

    def _where(self, condition: str, *args: Any) -> "Query":
        return replace(self, conditions=(*self.conditions, (condition, args)))

    def _compile(self) -> tuple[str, list[Any]]:
        parts = [f"SELECT {', '.join(map(quoted, self.columns))} FROM {quoted(self.name)}"]
        parts += self.joins
        if self.conditions:
            parts.append("WHERE " + " AND ".join(condition for condition, _ in self.conditions))
        if self.order:
            parts.append(f"ORDER BY {self.order}")
        if self.at_most is not None:
            parts.append(f"LIMIT {int(self.at_most)}")
        return " ".join(parts), [arg for _, args in self.conditions for arg in args]


class Database:
    """One database of an environment, read-only."""

    def __init__(self, name: str, run: RunQuery) -> None:
        self.name = name
        self._run = run

    def table(self, name: str) -> Query:
        return Query(self, name)

    def query(self, sql: str, args: Sequence[Any] | None = None) -> QueryResponse:
        """Run a statement; as with Fleet, a failure is in the response and not raised."""
        try:
            columns, rows = self._run(self.name, sql, args or ())
        except StatementError as error:
            return QueryResponse(False, error=str(error), message=f"Query failed: {error}")
        return QueryResponse(True, list(columns), [list(row) for row in rows], message="ok")

    exec = query

    def select(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        """Rows by column name. Raises StatementError."""
        columns, rows = self._run(self.name, sql, args)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def tables(self) -> list[str]:
        sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        return [row["name"] for row in self.select(sql)]

    def snapshot(self, name: str | None = None) -> "Database":
        return self

    def diff(self, other: "Database", ignore_config: IgnoreConfig | None = None) -> SnapshotDiff:
        return SnapshotDiff(self, other, ignore_config)


class _Instance:
    def load(self) -> None:
        """Nothing to load: an instance that is graded is running."""


class Environment:
    """The `env` of a verifier."""

    def __init__(self, run: RunQuery) -> None:
        self.instance = _Instance()
        self._run = run

    def db(self, name: str = "current") -> Database:
        if name not in ("seed", "current"):
            raise KeyError(f"unknown database {name!r}: there are 'seed' and 'current'")
        return Database(name, self._run)


def quoted(name: str) -> str:
    """Quote a plain identifier; an expression such as `COUNT(*) AS n` stays as it is.

    Brackets, because SQLite takes an unknown name in double quotes for a string.
    """
    return f"[{name}]" if name.isidentifier() else name


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def normalized_contains(target: str, blob: Any) -> bool:
    """Whether `target` is in `blob`, case, punctuation and spaces aside."""
    return _normalized(target) in _normalized(_as_text(blob))


def normalized_string_comparison(target: str, blob: Any) -> bool:
    """Whether `target` equals `blob`, case, punctuation and spaces aside."""
    return _normalized(target) == _normalized(_as_text(blob))


def extract_numbers(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text.replace(",", ""))]


def contains_number(text: str, target_number: Any) -> bool:
    if isinstance(target_number, str):
        target_number = target_number.replace(",", "")
    try:
        return float(target_number) in extract_numbers(text)
    except (TypeError, ValueError):
        return False


def _normalized(text: str) -> str:
    return "".join(text.lower().translate(_PUNCTUATION).split())


def _as_text(content: Any) -> str:
    return json.dumps(content, sort_keys=True) if isinstance(content, dict | list) else str(content)


def without_fleet(source: str) -> str:
    """A verifier's source without imports of the SDK and its decorator, which are not here."""
    return _FLEET_IMPORT.sub("", _DECORATOR.sub("", source))


def verifier_globals() -> dict[str, Any]:
    """The names that verifiers use without importing them."""
    return {
        "__name__": "verifier",
        "TASK_SUCCESSFUL_SCORE": TASK_SUCCESSFUL_SCORE,
        "TASK_FAILED_SCORE": TASK_FAILED_SCORE,
        "Environment": Environment,
        "DatabaseSnapshot": Database,
        "IgnoreConfig": IgnoreConfig,
        "SnapshotDiff": SnapshotDiff,
        "normalized_contains": normalized_contains,
        "normalized_string_comparison": normalized_string_comparison,
        "extract_numbers": extract_numbers,
        "contains_number": contains_number,
        "json": json,
        "re": re,
        "string": string,
    }
