"""Checksums over all rows of the journal, to detect changed, removed or restored rows.

SQLite's pages carry no checksums, and an intact row gives no sign of missing ones. So each
table has the number of its rows and the sum of their digests, modulo 2^128. Triggers of the
writing connection update both with every insert, update and delete; they are stored, chained to
the previous state, in the same transaction. A start reads all rows and sums them up again."""

import hashlib
import json
import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flotilla_learner.journal.progress_mark import Position
from flotilla_learner.journal.run_progress import (
    lost_tries,
    newest_epoch,
    owner_of,
    replayed_version,
)

# Summed columns of each table. Trajectories are sealed row by row (see record_digests).
SEALED: Mapping[str, tuple[str, ...]] = {
    "meta": ("key", "value"),
    "epochs": ("run_epoch", "forked_version", "started"),
    "groups": (
        *("group_id", "sequence_number", "purpose", "eval_id", "spec", "leased"),
        *("state", "reason", "step"),
    ),
    "leases": ("lease_id", "group_id", "worker_id", "incarnation", "request_id", "run_epoch"),
    "trajectories": (
        *("group_id", "attempt_index", "try", "row_digest", "received", "dropped"),
        "payload IS NULL",
    ),
    "tools": ("digest", "tools"),
    # Files and scores are compared with their hashes when they are read.
    "pictures": ("group_id", "sha256", "grid"),
    "teacher_scores": ("group_id", "attempt_index", "try", "digest"),
    "verdicts": (
        *("group_id", "scores", "failure", "model", "request_digest", "answer", "calls"),
        *("prompt_tokens", "completion_tokens", "seconds", "made"),
    ),
    "plans": ("step", "run_epoch", "attempts", "settings", "row_digest"),
    "publications": ("run_epoch", "version", "fingerprint"),
    "checkpoints": ("step", "directory", "files", "made"),
    "evals": ("eval_id", "moment", "version", "results"),
    "curriculum": ("id", "number", "step", "cursors", "made"),
    "curriculum_tasks": (
        *("task", "env", "standing", "groups", "passes", "attempts", "queued", "turn", "member"),
    ),
    "curriculum_events": ("id", "change", "task", "env", "kind", "reason"),
}
_MODULUS = 1 << 128


@dataclass(slots=True)
class TableTotal:
    """Number of rows, and the sum of their digests."""

    rows: int = 0
    digest: int = 0

    def count_row(self, sign: int, values: tuple[Any, ...]) -> None:
        """Add a row to the total, or remove it."""
        self.rows += sign
        self.digest = (self.digest + sign * _row_hash(values)) % _MODULUS


@dataclass(frozen=True, slots=True)
class Seal:
    """State of a journal after one commit."""

    journal: str
    commits: int
    # Chain before this commit.
    before: str
    totals: Mapping[str, TableTotal] = field(default_factory=dict[str, TableTotal])

    @property
    def chain(self) -> str:
        return hashlib.sha256(self._state_json().encode()).hexdigest()

    def next_seal(self, totals: Mapping[str, TableTotal]) -> "Seal":
        return Seal(self.journal, self.commits + 1, self.chain, totals)

    def encode(self) -> str:
        return json.dumps({"state": self._state_json(), "chain": self.chain})

    def _state_json(self) -> str:
        # Same as `asdict`, at a tenth of the cost: every commit needs it four times.
        totals = {
            name: {"rows": total.rows, "digest": total.digest}
            for name, total in self.totals.items()
        }
        state = {"journal": self.journal, "commits": self.commits, "before": self.before}
        return json.dumps({**state, "totals": totals}, sort_keys=True)


class BrokenSealError(ValueError):
    """The journal's seal differs from what was written."""


def load_seal(db: sqlite3.Connection) -> Seal:
    """Load the seal of the last commit. Raises BrokenSealError."""
    row = db.execute("SELECT body FROM seal").fetchone()
    if row is None:
        raise BrokenSealError("its seal is gone")
    try:
        body = json.loads(row[0])
        state = json.loads(body["state"])
        totals = {name: TableTotal(**total) for name, total in state.pop("totals").items()}
        seal = Seal(**state, totals=totals)
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenSealError(f"its seal cannot be read: {error!r}") from error
    if seal.chain != body["chain"]:
        raise BrokenSealError("its seal has changed")
    return seal


def current_position(db: sqlite3.Connection, seal: Seal) -> Position:
    """Return the position of a journal with this seal."""
    acknowledged = seal.totals["trajectories"].rows + lost_tries(db)
    reached = newest_epoch(db), replayed_version(db), acknowledged
    return Position(owner_of(db), seal.journal, seal.commits, seal.chain, *reached)


def sum_table(db: sqlite3.Connection, table: str) -> TableTotal:
    """Sum up all rows of a table."""
    total = TableTotal()
    for values in db.execute(f"SELECT {', '.join(SEALED[table])} FROM {table} NOT INDEXED"):
        total.count_row(1, values)
    return total


def reseal_tables(db: sqlite3.Connection) -> Seal:
    """Seal the current content of the tables, of a new or repaired journal."""
    totals = {table: sum_table(db, table) for table in SEALED}
    known = db.execute("SELECT 1 FROM seal").fetchone()
    seal = load_seal(db).next_seal(totals) if known else Seal(uuid.uuid4().hex, 0, "", totals)
    _store_seal(db, seal)
    return seal


class SealUpdater:
    """Keeps the seal up to date with the writes of one connection."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._changes: dict[str, TableTotal] = {}
        # Otherwise INSERT OR REPLACE deletes rows without firing the triggers.
        db.execute("PRAGMA recursive_triggers = ON")
        db.create_function("sealed", -1, self._count_row)
        for table, columns in SEALED.items():
            _add_triggers(db, table, columns)

    def begin_transaction(self) -> None:
        """Reset the changes at the start of a transaction."""
        self._changes = {}

    def copy_changes(self) -> dict[str, TableTotal]:
        """Return a copy of the changes, for `roll_back` to a savepoint that begins now."""
        return {table: replace(total) for table, total in self._changes.items()}

    def roll_back(self, changes: dict[str, TableTotal]) -> None:
        self._changes = changes

    def seal_transaction(self) -> Position | None:
        """Seal the open transaction; return None if it has changed nothing."""
        if not self._changes:
            return None
        old = load_seal(self._db)
        totals = {name: self._add_change(name, total) for name, total in old.totals.items()}
        seal = old.next_seal(totals)
        _store_seal(self._db, seal)
        return current_position(self._db, seal)

    def _add_change(self, name: str, total: TableTotal) -> TableTotal:
        change = self._changes.get(name, TableTotal())
        return TableTotal(total.rows + change.rows, (total.digest + change.digest) % _MODULUS)

    def _count_row(self, table: str, sign: int, *values: Any) -> None:
        self._changes.setdefault(table, TableTotal()).count_row(sign, values)


def _add_triggers(db: sqlite3.Connection, table: str, columns: tuple[str, ...]) -> None:
    out, taken = (
        f"SELECT sealed('{table}', {sign}, {', '.join(f'{row}.{name}' for name in columns)});"
        for sign, row in ((-1, "old"), (1, "new"))
    )
    for event, action in (("INSERT", taken), ("UPDATE", out + taken), ("DELETE", out)):
        # Only on this connection: the file remains readable and writable by any program.
        name = f"seal_{table}_{event.lower()}"
        db.execute(f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{table} BEGIN {action} END")


def _store_seal(db: sqlite3.Connection, seal: Seal) -> None:
    db.execute("INSERT OR REPLACE INTO seal VALUES (1, ?)", (seal.encode(),))


def _row_hash(values: tuple[Any, ...]) -> int:
    # `repr` distinguishes 1, 1.0, "1" and b"1".
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:16])
