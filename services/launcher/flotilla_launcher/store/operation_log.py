"""Operations that the launcher requests from backends, recorded before the request, so that
after a crash the open ones are known. Arguments carry no secrets."""

import json
import sqlite3
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flotilla_launcher import clock


class OperationState(StrEnum):
    """Stages of an operation. If a launcher dies before an operation is over, its successor
    looks for the result by name before it repeats the request."""

    INTENT = "intent"
    SENT = "sent"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (OperationState.DONE, OperationState.FAILED)


@dataclass(frozen=True, slots=True)
class Operation:
    """One request to a backend, sent or about to be sent."""

    number: int
    state: OperationState


class OperationLog:
    """The ledger's operations. Writes belong in a transaction of the Ledger."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def record_intent(self, run_id: str, kind: str, name: str, **arguments: Any) -> int:
        """Record a request before it is sent; return the operation's number."""
        now = clock.now()
        cursor = self._db.execute(
            "INSERT INTO operations"
            " (run_id, kind, name, state, arguments_json, detail, created, changed)"
            " VALUES (?, ?, ?, ?, ?, '', ?, ?)",
            (run_id, kind, name, OperationState.INTENT, json.dumps(arguments), now, now),
        )
        return int(cursor.lastrowid or 0)

    def mark_state(self, number: int, state: OperationState, detail: str = "") -> None:
        self._db.execute(
            "UPDATE operations SET state = ?, detail = ?, changed = ? WHERE number = ?",
            (state, detail, clock.now(), number),
        )

    def find_open(self, run_id: str, kind: str, name: str) -> Operation | None:
        """Return the newest operation of this name, if it is not over."""
        row = self._db.execute(
            "SELECT number, state FROM operations WHERE run_id = ? AND kind = ? AND name = ?"
            " ORDER BY number DESC LIMIT 1",
            (run_id, kind, name),
        ).fetchone()
        found = None if row is None else Operation(row["number"], OperationState(row["state"]))
        return None if found is None or found.state.is_over else found
