"""What the launcher asks of backends, written down before it is asked: after a crash it is known
what may be under way. Arguments carry no secrets."""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.launcher import clock


class OperationState(StrEnum):
    """How far an operation has come. What is not over when a launcher dies is looked for by name
    before anything is asked again."""

    INTENT = "intent"
    SENT = "sent"
    DONE = "done"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (OperationState.DONE, OperationState.FAILED)


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that was asked of a backend, or will be."""

    number: int
    kind: str
    name: str
    state: OperationState
    arguments: Mapping[str, Any]
    detail: str


class Operations:
    """The ledger's operations. Writes belong in a transaction of the Store."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def intend(self, run_id: str, kind: str, name: str, **arguments: Any) -> int:
        """Write down what will be asked; returns the operation's number."""
        now = clock.now()
        cursor = self._db.execute(
            "INSERT INTO operations"
            " (run_id, kind, name, state, arguments_json, detail, created, changed)"
            " VALUES (?, ?, ?, ?, ?, '', ?, ?)",
            (run_id, kind, name, OperationState.INTENT, json.dumps(arguments), now, now),
        )
        return int(cursor.lastrowid or 0)

    def mark(self, number: int, state: OperationState, detail: str = "") -> None:
        self._db.execute(
            "UPDATE operations SET state = ?, detail = ?, changed = ? WHERE number = ?",
            (state, detail, clock.now(), number),
        )

    def conclude(self, number: int, success: bool, detail: str) -> None:
        self.mark(number, OperationState.DONE if success else OperationState.FAILED, detail)

    def of(self, run_id: str) -> list[Operation]:
        """A run's operations in the order of their intent."""
        rows = self._db.execute(
            "SELECT * FROM operations WHERE run_id = ? ORDER BY number", (run_id,)
        ).fetchall()
        return [_operation(row) for row in rows]

    def open(self, run_id: str, kind: str, name: str) -> Operation | None:
        """The newest operation of this name, if it is not over."""
        row = self._db.execute(
            "SELECT * FROM operations WHERE run_id = ? AND kind = ? AND name = ?"
            " ORDER BY number DESC LIMIT 1",
            (run_id, kind, name),
        ).fetchone()
        found = None if row is None else _operation(row)
        return None if found is None or found.state.over else found


def _operation(row: sqlite3.Row) -> Operation:
    return Operation(
        row["number"],
        row["kind"],
        row["name"],
        OperationState(row["state"]),
        json.loads(row["arguments_json"]),
        row["detail"],
    )
