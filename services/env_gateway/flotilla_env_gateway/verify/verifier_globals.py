"""Names available to a running verifier: Fleet's environment, databases and text helpers.

Pure Python without I/O of its own: databases are read through a function that the caller
passes."""

import json
import re
import sqlite3
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_env_gateway.verify.change_rules import IgnoreConfig
from flotilla_env_gateway.verify.database_diff import SnapshotDiff
from flotilla_env_gateway.verify.table_query import Query, Row

TASK_SUCCESSFUL_SCORE = 1
TASK_FAILED_SCORE = 0

# (database, sql, arguments) to (columns, rows); raises sqlite3.Error.
RunQuery = Callable[[str, str, Sequence[Any]], tuple[Sequence[str], Sequence[Sequence[Any]]]]
# Raises ToolError.
CallTool = Callable[[str, Mapping[str, Any]], str]

_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))
_NUMBER = re.compile(r"-?\d+\.?\d*")
_FLEET_IMPORT = re.compile(r"^[ \t]*(from fleet\b.*? import .*|import fleet\b.*)$\n?", re.MULTILINE)
_DECORATOR = re.compile(r"^@verifier\b(\([^)]*\))?[ \t]*\n", re.MULTILINE)


class ToolError(Exception):
    """A tool refused or failed, or a verifier may not call it."""


class StatementError(sqlite3.OperationalError):
    """A queried database refused the statement."""


@dataclass(frozen=True)
class QueryResponse:
    """Result of `Database.query`, in Fleet's shape."""

    success: bool
    columns: list[str] | None = None
    rows: list[list[Any]] | None = None
    error: str | None = None
    message: str = ""


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
        except (sqlite3.Error, sqlite3.Warning) as error:
            return QueryResponse(False, error=str(error), message=f"Query failed: {error}")
        return QueryResponse(True, list(columns), [list(row) for row in rows], message="ok")

    exec = query

    def select(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        """Rows by column name. Raises sqlite3.Error."""
        columns, rows = self._run(self.name, sql, args)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def tables(self) -> list[str]:
        sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        return [row["name"] for row in self.select(sql)]

    def snapshot(self, name: str | None = None) -> "Database":
        return self

    def diff(self, other: "Database", ignore_config: IgnoreConfig | None = None) -> SnapshotDiff:
        return SnapshotDiff(self, other, ignore_config)

    def expect_row(
        self, table: str, where: Mapping[str, Any], expect: Mapping[str, Any]
    ) -> "Database":
        query = self.table(table).where(where).assert_exists()
        for column, value in expect.items():
            query.assert_eq(column, value)
        return self

    def expect_rows(
        self,
        table: str,
        where: Mapping[str, Any],
        *,
        count: int | None = None,
        contains: Sequence[Mapping[str, Any]] | None = None,
    ) -> "Database":
        query = self.table(table).where(where)
        if count is not None:
            query.count().assert_eq(count)
        rows = query.all() if contains else []
        for wanted in contains or ():
            if not any(all(row.get(k) == v for k, v in wanted.items()) for row in rows):
                raise AssertionError(f"no row of {table!r} matches {dict(wanted)}")
        return self

    def expect_absent_row(self, table: str, where: Mapping[str, Any]) -> "Database":
        self.table(table).where(where).assert_none()
        return self


class _Instance:
    def load(self) -> None:
        """Nothing to load: an instance that is graded is running."""


class Environment:
    """The `env` of a verifier."""

    def __init__(self, run: RunQuery, call: CallTool | None = None) -> None:
        self.instance = _Instance()
        self._run = run
        self._call = call

    def db(self, name: str = "current") -> Database:
        if name not in ("seed", "current"):
            raise KeyError(f"unknown database {name!r}: there are 'seed' and 'current'")
        return Database(name, self._run)

    def call_tool(self, name: str, /, **arguments: Any) -> Any:
        """Call a read-only tool; return JSON as a value, other text as it is.

        This is not part of Fleet's dialect: it serves environments that expose no database.
        Raises ToolError."""
        if self._call is None:
            raise ToolError("there are no tools to call")
        text = self._call(name, arguments)
        try:
            return json.loads(text)
        except ValueError:
            return text


def normalized_contains(target: str, blob: Any) -> bool:
    """Return True if `target` is in `blob`, case, punctuation and spaces aside."""
    return _normalize_text(target) in _normalize_text(_as_text(blob))


def normalized_string_comparison(target: str, blob: Any) -> bool:
    """Return True if `target` equals `blob`, case, punctuation and spaces aside."""
    return _normalize_text(target) == _normalize_text(_as_text(blob))


def extract_numbers(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text.replace(",", ""))]


def contains_number(text: str, target_number: Any) -> bool:
    if isinstance(target_number, str):
        target_number = target_number.replace(",", "")
    try:
        return float(target_number) in extract_numbers(text)
    except (TypeError, ValueError):
        return False


def _normalize_text(text: str) -> str:
    return "".join(text.lower().translate(_PUNCTUATION).split())


def _as_text(content: Any) -> str:
    return json.dumps(content, sort_keys=True) if isinstance(content, dict | list) else str(content)


def without_fleet(source: str) -> str:
    """Return a verifier's source without imports of the SDK and its decorator, which are absent."""
    return _FLEET_IMPORT.sub("", _DECORATOR.sub("", source))


def verifier_globals() -> dict[str, Any]:
    """Return the names that verifiers use without importing them."""
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
