"""What the rows of the journal add up to, so that one that changes, goes or comes back is noticed.

SQLite's pages carry no checksums, and a row that is whole says nothing of those that are gone. So
each table has the number of its rows and the sum of their digests, modulo 2^128. Triggers of the
writing connection keep both up with every insert, update and delete; they are stored, chained to
the state before, in the same transaction. A start reads all rows and adds them up again.
"""

import hashlib
import json
import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from services.learner.journal.progress_mark import Position
from services.learner.journal.row_codec import replayed_version
from services.learner.journal.schema import LOST_WITH_DISK

# Of each table the columns that are added up. Trajectories are sealed row by row (see integrity).
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
class Total:
    """Number of rows, and the sum of their digests."""

    rows: int = 0
    digest: int = 0

    def count(self, sign: int, values: tuple[Any, ...]) -> None:
        """Take a row in, or out."""
        self.rows += sign
        self.digest = (self.digest + sign * _digest(values)) % _MODULUS


@dataclass(frozen=True, slots=True)
class Seal:
    """The state of a journal after one commit."""

    journal: str
    commits: int
    # The chain before this commit.
    before: str
    totals: Mapping[str, Total] = field(default_factory=dict[str, Total])

    @property
    def chain(self) -> str:
        return hashlib.sha256(self._text().encode()).hexdigest()

    def next(self, totals: Mapping[str, Total]) -> "Seal":
        return Seal(self.journal, self.commits + 1, self.chain, totals)

    def encode(self) -> str:
        return json.dumps({"state": self._text(), "chain": self.chain})

    def _text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class BrokenSealError(ValueError):
    """The journal's seal is not what was written."""


def stored(db: sqlite3.Connection) -> Seal:
    """The seal of the last commit. Raises BrokenSealError."""
    row = db.execute("SELECT body FROM seal").fetchone()
    if row is None:
        raise BrokenSealError("its seal is gone")
    try:
        body = json.loads(row[0])
        state = json.loads(body["state"])
        totals = {name: Total(**total) for name, total in state.pop("totals").items()}
        seal = Seal(**state, totals=totals)
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenSealError(f"its seal cannot be read: {error!r}") from error
    if seal.chain != body["chain"]:
        raise BrokenSealError("its seal has changed")
    return seal


def position(db: sqlite3.Connection, seal: Seal) -> Position:
    """Of a journal with this seal."""
    (epoch,) = db.execute("SELECT coalesce(max(run_epoch), 0) FROM epochs").fetchone()
    query = "SELECT CAST(value AS INTEGER) FROM meta WHERE key = ?"
    (lost,) = db.execute(query, (LOST_WITH_DISK,)).fetchone() or (0,)
    acknowledged = seal.totals["trajectories"].rows + lost
    step = replayed_version(db)
    return Position(seal.journal, seal.commits, seal.chain, epoch, step, acknowledged)


def added_up(db: sqlite3.Connection, table: str) -> Total:
    """The total of all rows that a table has."""
    total = Total()
    for values in db.execute(f"SELECT {', '.join(SEALED[table])} FROM {table} NOT INDEXED"):
        total.count(1, values)
    return total


def seal_anew(db: sqlite3.Connection) -> Seal:
    """Seal what the tables hold now, whoever wrote it: of a new journal, or a mended one."""
    totals = {table: added_up(db, table) for table in SEALED}
    known = db.execute("SELECT 1 FROM seal").fetchone()
    seal = stored(db).next(totals) if known else Seal(uuid.uuid4().hex, 0, "", totals)
    _store(db, seal)
    return seal


class Sealing:
    """Keeps the seal up with what one connection writes."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._changes: dict[str, Total] = {}
        # Else what INSERT OR REPLACE takes away is not heard of.
        db.execute("PRAGMA recursive_triggers = ON")
        db.create_function("sealed", -1, self._count)
        for table, columns in SEALED.items():
            _add_triggers(db, table, columns)

    def begin(self) -> None:
        """A transaction begins."""
        self._changes = {}

    def changes(self) -> dict[str, Total]:
        """For `roll_back`, to a savepoint that begins now."""
        return {table: replace(total) for table, total in self._changes.items()}

    def roll_back(self, changes: dict[str, Total]) -> None:
        self._changes = changes

    def seal(self) -> Position | None:
        """Seal the open transaction; None when it has changed nothing."""
        if not self._changes:
            return None
        old = stored(self._db)
        totals = {name: self._sum(name, total) for name, total in old.totals.items()}
        seal = old.next(totals)
        _store(self._db, seal)
        return position(self._db, seal)

    def _sum(self, name: str, total: Total) -> Total:
        change = self._changes.get(name, Total())
        return Total(total.rows + change.rows, (total.digest + change.digest) % _MODULUS)

    def _count(self, table: str, sign: int, *values: Any) -> None:
        self._changes.setdefault(table, Total()).count(sign, values)


def _add_triggers(db: sqlite3.Connection, table: str, columns: tuple[str, ...]) -> None:
    out, taken = (
        f"SELECT sealed('{table}', {sign}, {', '.join(f'{row}.{name}' for name in columns)});"
        for sign, row in ((-1, "old"), (1, "new"))
    )
    for event, action in (("INSERT", taken), ("UPDATE", out + taken), ("DELETE", out)):
        # Of this connection alone: the file stays one that any program can read and write.
        name = f"seal_{table}_{event.lower()}"
        db.execute(f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{table} BEGIN {action} END")


def _store(db: sqlite3.Connection, seal: Seal) -> None:
    db.execute("INSERT OR REPLACE INTO seal VALUES (1, ?)", (seal.encode(),))


def _digest(values: tuple[Any, ...]) -> int:
    # `repr` tells 1, 1.0, "1" and b"1" apart.
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:16])
