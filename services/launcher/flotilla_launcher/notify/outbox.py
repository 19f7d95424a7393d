"""Outbox of messages yet to be sent, in the launcher's ledger, so that none is lost when the
launcher dies.

A row is identified by (run_id, event, sink), so a repeated event keeps one message. A row becomes
`sending` before its first byte leaves: a sender that finds one in that state must check whether it
arrived."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from flotilla_common.text.redaction import redact
from flotilla_launcher.notify.messages import Message
from flotilla_launcher.store.write_transaction import write_transaction

_SCHEMA = """
CREATE TABLE IF NOT EXISTS outbox (
  run_id TEXT NOT NULL, event TEXT NOT NULL, sink TEXT NOT NULL, target TEXT NOT NULL,
  message TEXT NOT NULL, created REAL NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL,
  due REAL NOT NULL, error TEXT NOT NULL, PRIMARY KEY (run_id, event, sink)
);
CREATE TABLE IF NOT EXISTS threads (
  run_id TEXT NOT NULL, target TEXT NOT NULL, thread TEXT NOT NULL, PRIMARY KEY (run_id, target)
);
CREATE TABLE IF NOT EXISTS first_evaluations (run_id TEXT PRIMARY KEY, pass_at_1 REAL NOT NULL);
"""


class LetterState(StrEnum):
    """Delivery state of a row."""

    WAITING = "waiting"
    SENDING = "sending"
    SENT = "sent"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class DeliveryTarget:
    """Target of messages: `kind` is slack | webhook. Secrets are named by their variable only."""

    kind: str
    secret_env: str
    address: str = ""
    channel: str = ""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message on its way. `thread` is the one that earlier letters of the run began at this
    target."""

    run_id: str
    event: str
    target: DeliveryTarget
    message: Message
    created: float
    state: LetterState
    attempts: int
    due: float
    thread: str = ""

    @property
    def key(self) -> str:
        """Idempotency key: the same for every attempt at this letter, and unique to it."""
        return f"{self.run_id}/{self.event}"


_LETTER = TypeAdapter(Letter)


class Outbox:
    """Store of the outbox's tables, on its own connection; calls are short and block."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def put_message(
        self,
        run_id: str,
        event: str,
        message: Message,
        targets: Sequence[DeliveryTarget],
        now: float,
    ) -> None:
        """Keep a message for each target, unless the event has one already."""
        text = redact(json.dumps(asdict(message)))
        with write_transaction(self._db):
            self._db.executemany(
                "INSERT OR IGNORE INTO outbox VALUES (?, ?, ?, ?, ?, ?, 'waiting', 0, 0, '')",
                [(run_id, event, at.kind, _target_to_json(at), text, now) for at in targets],
            )

    def list_heads(self) -> list[Letter]:
        """List the oldest unsent letter of each run and target; later ones wait for its
        thread."""
        rows = self._db.execute(
            "SELECT outbox.*, MIN(outbox.rowid), coalesce(threads.thread, '') AS thread FROM outbox"
            " LEFT JOIN threads USING (run_id, target)"
            " WHERE state IN ('waiting', 'sending') GROUP BY run_id, target ORDER BY outbox.rowid"
        )
        return [_letter_from_row(row) for row in rows.fetchall()]

    def mark_sending(self, letter: Letter) -> None:
        """Record that the letter may arrive from now on."""
        self._update_row(letter, LetterState.SENDING, letter.attempts + 1, letter.due, "")

    def mark_sent(self, letter: Letter, thread: str) -> None:
        """Record that the letter has arrived; the first of a run begins its thread at a
        target."""
        with write_transaction(self._db):
            self._update_row(letter, LetterState.SENT, letter.attempts + 1, letter.due, "")
            self._db.execute(
                "INSERT OR IGNORE INTO threads VALUES (?, ?, ?)",
                (letter.run_id, _target_to_json(letter.target), thread),
            )

    def mark_delayed(self, letter: Letter, due: float, error: str, *, unsure: bool) -> None:
        """Schedule another attempt at `due`; `unsure` if the letter may have arrived."""
        state = LetterState.SENDING if unsure else LetterState.WAITING
        self._update_row(letter, state, letter.attempts + 1, due, redact(error))

    def mark_given_up(self, letter: Letter, error: str) -> None:
        self._update_row(letter, LetterState.GIVEN_UP, letter.attempts, letter.due, redact(error))

    def _update_row(
        self, letter: Letter, state: LetterState, attempts: int, due: float, error: str
    ) -> None:
        self._db.execute(
            "UPDATE outbox SET state = ?, attempts = ?, due = ?, error = ?"
            " WHERE run_id = ? AND event = ? AND sink = ?",
            (state, attempts, due, error, letter.run_id, letter.event, letter.target.kind),
        )

    def has_begun_before(self, run_id: str, event: str) -> bool:
        """Return whether another event has announced this run's start."""
        row = self._db.execute(
            "SELECT 1 FROM outbox WHERE run_id = ? AND event != ?"
            " AND json_extract(message, '$.kind') IN ('started', 'resumed')",
            (run_id, event),
        ).fetchone()
        return row is not None

    def note_evaluation(self, run_id: str, pass_at_1: float) -> None:
        """Keep a run's first evaluation; later ones change nothing."""
        row = (run_id, pass_at_1)
        self._db.execute("INSERT OR IGNORE INTO first_evaluations VALUES (?, ?)", row)

    def get_first_evaluation(self, run_id: str) -> float | None:
        row = self._db.execute(
            "SELECT pass_at_1 FROM first_evaluations WHERE run_id = ?", (run_id,)
        ).fetchone()
        return None if row is None else float(row["pass_at_1"])


def _target_to_json(target: DeliveryTarget) -> str:
    return json.dumps(asdict(target), sort_keys=True)


def _letter_from_row(row: sqlite3.Row) -> Letter:
    read = {name: json.loads(row[name]) for name in ("message", "target")}
    return _LETTER.validate_python({**dict(row), **read})
