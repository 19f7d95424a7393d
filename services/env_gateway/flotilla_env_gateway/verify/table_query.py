"""Fleet's query builder for one table: a chain of calls that becomes a statement."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

Row = dict[str, Any]


class Selects(Protocol):
    def select(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        """Rows by column name. Raises sqlite3.Error."""
        ...


class Count(int):
    """A number of rows, with Fleet's assertions."""

    @property
    def value(self) -> int:
        return int(self)

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

    database: Selects
    name: str
    columns: tuple[str, ...] = ("*",)
    conditions: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    joins: tuple[str, ...] = ()
    order: str = ""
    at_most: int | None = None

    def select(self, *columns: str) -> "Query":
        return replace(self, columns=columns or ("*",))

    def eq(self, column: str, value: Any) -> "Query":
        return self._add_condition(f"{quoted(column)} = ?", value)

    def neq(self, column: str, value: Any) -> "Query":
        return self._add_condition(f"{quoted(column)} != ?", value)

    def gt(self, column: str, value: Any) -> "Query":
        return self._add_condition(f"{quoted(column)} > ?", value)

    def gte(self, column: str, value: Any) -> "Query":
        return self._add_condition(f"{quoted(column)} >= ?", value)

    def lt(self, column: str, value: Any) -> "Query":
        return self._add_condition(f"{quoted(column)} < ?", value)

    def lte(self, column: str, value: Any) -> "Query":
        return self._add_condition(f"{quoted(column)} <= ?", value)

    def like(self, column: str, pattern: str) -> "Query":
        return self._add_condition(f"{quoted(column)} LIKE ?", pattern)

    ilike = like

    def in_(self, column: str, values: Iterable[Any]) -> "Query":
        listed = tuple(values)
        return self._add_condition(f"{quoted(column)} IN ({_make_placeholders(listed)})", *listed)

    def not_in(self, column: str, values: Iterable[Any]) -> "Query":
        listed = tuple(values)
        return self._add_condition(
            f"{quoted(column)} NOT IN ({_make_placeholders(listed)})", *listed
        )

    def is_null(self, column: str) -> "Query":
        return self._add_condition(f"{quoted(column)} IS NULL")

    def not_null(self, column: str) -> "Query":
        return self._add_condition(f"{quoted(column)} IS NOT NULL")

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
        sql, args = self._compile_sql()
        return self.database.select(sql, args)

    def first(self) -> Row | None:
        return next(iter(self.limit(1).all()), None)

    def count(self) -> Count:
        query = replace(self, columns=("COUNT(*) AS n",), at_most=None)
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

    def _add_condition(self, condition: str, *args: Any) -> "Query":
        return replace(self, conditions=(*self.conditions, (condition, args)))

    def _compile_sql(self) -> tuple[str, list[Any]]:
        parts = [f"SELECT {', '.join(map(quoted, self.columns))} FROM {quoted(self.name)}"]
        parts += self.joins
        if self.conditions:
            parts.append("WHERE " + " AND ".join(condition for condition, _ in self.conditions))
        if self.order:
            parts.append(f"ORDER BY {self.order}")
        if self.at_most is not None:
            parts.append(f"LIMIT {int(self.at_most)}")
        return " ".join(parts), [arg for _, args in self.conditions for arg in args]


def quoted(name: str) -> str:
    """Quote a plain identifier; an expression such as `COUNT(*) AS n` stays as it is.

    It uses brackets, because SQLite takes an unknown name in double quotes for a string.
    """
    return f"[{name}]" if name.isidentifier() else name


def exactly(name: str) -> str:
    """Quote any name of a database; SQLite never takes an unknown one for a string."""
    return "`" + name.replace("`", "``") + "`"


def _make_placeholders(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))
