"""Runner of a verifier of this repository over an instance in this process.

Only for the verifiers in `environments/`: the source is executed directly. It provides only the
part of Fleet's dialect that those verifiers use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

from flotilla_environments.api import DatabaseName, Instance

Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The score, checks and named rewards that the verifier returned, and its number of queries."""

    score: int
    passed: list[str]
    failed: list[str]
    queries: int
    rewards: dict[str, float | None] | None = None


class Table:
    """A table or a part of it, as `snapshot.table("bookings").eq("id", 7)`."""

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
        return self._snapshot.fetch_rows(sql, [value for _, value in self._where])


class Snapshot:
    """One of the two databases."""

    def __init__(self, env: "VerifierEnvironment", name: DatabaseName) -> None:
        self._env = env
        self._name: DatabaseName = name

    def table(self, name: str) -> Table:
        return Table(self, name)

    def fetch_rows(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        self._env.queries += 1
        result = self._env.judged.query(self._name, sql, args)
        return [dict(zip(result.columns, row, strict=True)) for row in result.rows]


class VerifierEnvironment:
    """The `env` of a verifier."""

    def __init__(self, instance: Instance) -> None:
        self.judged = instance
        self.instance = self
        self.queries = 0

    def load(self) -> None:
        """Do nothing: Fleet's verifiers wait like this for the instance, and ours is there."""

    def db(self, name: DatabaseName) -> Snapshot:
        return Snapshot(self, name)


def run_verifier(source: str, instance: Instance, final_answer: str | None) -> Verdict:
    """Run a verifier's source over an instance. Raises the verifier's errors."""
    env, namespace = VerifierEnvironment(instance), dict[str, Any]()
    exec(_compile_source(source), namespace)
    returned = namespace["validate_task"](env, final_answer)
    checks = returned["passed"], returned["failed"]
    return Verdict(returned["score"], *checks, env.queries, returned.get("rewards"))


@cache
def _compile_source(source: str) -> CodeType:
    return compile(source, "verifier", "exec")
