"""The part of Fleet's verifier dialect that our verifiers use, over an instance in this process."""

import contextlib
import io
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from environments.api import DatabaseName, Instance

Row = dict[str, Any]


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
        self._name: DatabaseName = name

    def table(self, name: str) -> Table:
        return Table(self, name)

    def rows(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        self._env.queries += 1
        result = self._env.open.query(self._name, sql, args)
        return [dict(zip(result.columns, row, strict=True)) for row in result.rows]


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


def grade(source: str, instance: Instance, final_answer: str | None = "") -> int:
    return grade_in_detail(source, instance, final_answer)[0]


def grade_in_detail(
    source: str, instance: Instance, final_answer: str | None = ""
) -> tuple[int, str, int]:
    """(result, what it printed, number of queries)."""
    env, printed = Environment(instance), io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = cast(int, _compiled(source)(env, final_answer))
    return result, printed.getvalue(), env.queries
