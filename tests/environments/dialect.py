"""The part of Fleet's verifier dialect that our verifiers use, over an instance in this process."""

import contextlib
import io
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from environments.api import DatabaseName, Instance

Row = dict[str, Any]
Change = dict[str, Any]


class Table:
    def __init__(self, snapshot: "Snapshot", name: str) -> None:
        self._snapshot = snapshot
        self._name = name
        self._columns = "*"
        self._where: list[tuple[str, Any]] = []

    def select(self, *columns: str) -> "Table":
        self._columns = ", ".join(columns)
        return self

    def eq(self, column: str, value: Any) -> "Table":
        self._where.append((column, value))
        return self

    def all(self) -> list[Row]:
        conditions = " and ".join(f"{column} = ?" for column, _ in self._where) or "1"
        sql = f"select {self._columns} from {self._name} where {conditions}"
        return self._snapshot.rows(sql, [value for _, value in self._where])


class Snapshot:
    def __init__(self, env: "Environment", name: DatabaseName) -> None:
        self._env = env
        self._name = name

    def table(self, name: str) -> Table:
        return Table(self, name)

    def rows(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        self._env.queries += 1
        result = self._env.open.query(self._name, sql, args)
        return [dict(zip(result.columns, row, strict=True)) for row in result.rows]

    def contents(self) -> dict[tuple[str, Any], Row]:
        """Every row of the database by table and primary key."""
        found = self._env.open.query(
            self._name, "select name from sqlite_master where type = 'table'"
        )
        result: dict[tuple[str, Any], Row] = {}
        for (table,) in found.rows:
            rows = self._env.open.query(self._name, f"select * from {table}")
            for row in rows.rows:
                result[table, row[0]] = dict(zip(rows.columns, row, strict=True))
        return result

    def diff(self, other: "Snapshot") -> "Diff":
        return Diff(self.contents(), other.contents())


class Diff:
    def __init__(self, before: dict[tuple[str, Any], Row], after: dict[tuple[str, Any], Row]):
        self._before = before
        self._after = after

    def expect_only_v2(self, allowed: Sequence[Change]) -> None:
        for key in self._before.keys() | self._after.keys():
            before, after = self._before.get(key), self._after.get(key)
            if before != after and not any(_allows(spec, key, before, after) for spec in allowed):
                raise AssertionError(f"{key[0]} {key[1]}: {before} -> {after}")


def _allows(spec: Change, key: tuple[str, Any], before: Row | None, after: Row | None) -> bool:
    if (spec["table"], spec["pk"]) != key:
        return False
    if before is None:
        return spec["type"] == "insert" and dict(spec["fields"]) == after
    if after is None:
        return spec["type"] == "delete"
    changed = {name: value for name, value in after.items() if before[name] != value}
    return spec["type"] == "modify" and changed.items() <= dict(spec["resulting_fields"]).items()


class Environment:
    """What a verifier gets as `env`."""

    def __init__(self, instance: Instance) -> None:
        self.open = instance
        self.instance = self
        self.queries = 0
        self.loaded = False

    def load(self) -> None:
        self.loaded = True

    def db(self, name: DatabaseName) -> Snapshot:
        assert self.loaded, "verifiers load the instance first"
        return Snapshot(self, name)


@cache
def _compiled(source: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(compile(source, "verifier", "exec"), namespace)
    return namespace["validate_task"]


def grade(source: str, instance: Instance) -> int:
    return grade_in_detail(source, instance)[0]


def grade_in_detail(source: str, instance: Instance) -> tuple[int, str, int]:
    """(result, what it printed, queries without the diff's own)."""
    env, printed = Environment(instance), io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = cast(int, _compiled(source)(env))
    return result, printed.getvalue(), env.queries
