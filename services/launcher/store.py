"""The launcher's ledger: runs, replicas and every event, in one SQLite file.

WAL with synchronous=NORMAL: what was written survives a kill of the launcher. It need not survive
a loss of power, for that ends the processes it speaks of as well.
"""

import json
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.launcher.runs import Replica, ReplicaState, Run, RunMode, RunState, Unit

# Progress events kept per run; transitions and messages are kept for ever.
PROGRESS_KEPT = 5_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
  run_id TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT NOT NULL, mode TEXT NOT NULL,
  spec_json TEXT NOT NULL, error TEXT NOT NULL, wanted_json TEXT NOT NULL,
  metrics_json TEXT NOT NULL DEFAULT '{}', created REAL NOT NULL, ended REAL,
  next_event INTEGER NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS replicas (
  run_id TEXT NOT NULL, service TEXT NOT NULL, replica INTEGER NOT NULL, state TEXT NOT NULL,
  phase TEXT NOT NULL, address TEXT NOT NULL, restarts INTEGER NOT NULL,
  unit TEXT, pid INTEGER, started REAL,
  PRIMARY KEY (run_id, service, replica)
);
CREATE TABLE IF NOT EXISTS events (
  run_id TEXT NOT NULL, event INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL,
  body TEXT NOT NULL, PRIMARY KEY (run_id, event)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
  request_id TEXT PRIMARY KEY, digest TEXT NOT NULL, run_id TEXT NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `kind`: state | replica | progress | message; `body` is its JSON."""

    number: int
    time: float
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as the ledger has it. Times are seconds since the epoch."""

    run: Run
    spec_json: str
    created: float
    ended: float | None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Store:
    """Reads and writes the ledger. Calls take well under a millisecond and block."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Make what is written inside one commit."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def request(self, request_id: str) -> tuple[str, str] | None:
        """The digest and run of a StartRun that was answered before."""
        row = self._db.execute(
            "SELECT digest, run_id FROM requests WHERE request_id = ?", (request_id,)
        ).fetchone()
        return None if row is None else (row["digest"], row["run_id"])

    def remember(self, request_id: str, digest: str, run_id: str) -> None:
        """Keep the answer to a StartRun."""
        self._db.execute("INSERT INTO requests VALUES (?, ?, ?)", (request_id, digest, run_id))

    def begin(self, run: Run, spec_json: str, now: float) -> None:
        """Write a run that starts, for the first time or again."""
        self._db.execute(
            "INSERT INTO runs (run_id, name, state, mode, spec_json, error, wanted_json, created)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id) DO UPDATE SET"
            " state = excluded.state, mode = excluded.mode, spec_json = excluded.spec_json,"
            " error = '', wanted_json = excluded.wanted_json, ended = NULL",
            (*_head(run), spec_json, run.error, json.dumps(dict(run.wanted)), now),
        )
        self._db.execute("DELETE FROM replicas WHERE run_id = ?", (run.run_id,))

    def save(self, run: Run, replicas: list[Replica], ended: float | None) -> None:
        """Write a run's head and those of its replicas that changed."""
        self._db.execute(
            "UPDATE runs SET state = ?, error = ?, wanted_json = ?, ended = ? WHERE run_id = ?",
            (run.state, run.error, json.dumps(dict(run.wanted)), ended, run.run_id),
        )
        rows = [_row(run.run_id, replica) for replica in replicas]
        self._db.executemany(
            "INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
        )

    def save_metrics(self, run_id: str, metrics: Mapping[str, float]) -> None:
        self._db.execute(
            "UPDATE runs SET metrics_json = ? WHERE run_id = ?", (json.dumps(dict(metrics)), run_id)
        )

    def add_event(self, run_id: str, now: float, kind: str, body: Mapping[str, Any]) -> int:
        """Append an event and return its number; old progress makes room."""
        row = self._db.execute(
            "UPDATE runs SET next_event = next_event + 1 WHERE run_id = ?"
            " RETURNING next_event - 1 AS event",
            (run_id,),
        ).fetchone()
        number = int(row["event"])
        self._db.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
            (run_id, number, now, kind, json.dumps(dict(body))),
        )
        if kind == "progress" and number % 100 == 0:
            self._db.execute(
                "DELETE FROM events WHERE run_id = ? AND kind = 'progress' AND event < ?",
                (run_id, number - PROGRESS_KEPT),
            )
        return number

    def events(self, run_id: str, after: int, limit: int = 200) -> list[Event]:
        rows = self._db.execute(
            "SELECT event, time, kind, body FROM events WHERE run_id = ? AND event > ?"
            " ORDER BY event LIMIT ?",
            (run_id, after, limit),
        ).fetchall()
        return [Event(r["event"], r["time"], r["kind"], json.loads(r["body"])) for r in rows]

    def has_trained(self, run_id: str) -> bool:
        """Whether the run's learner ever told of a step."""
        row = self._db.execute(
            "SELECT 1 FROM events WHERE run_id = ? AND kind = 'progress'"
            " AND json_extract(body, '$.step') > 0 LIMIT 1",
            (run_id,),
        ).fetchone()
        return row is not None

    def get(self, run_id: str) -> StoredRun | None:
        row = self._db.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        return None if row is None else self._stored(row)

    def newest(self, limit: int = 1_000) -> list[StoredRun]:
        """The runs, newest first."""
        rows = self._db.execute(
            "SELECT * FROM runs ORDER BY created DESC, run_id DESC LIMIT ?", (limit,)
        ).fetchall()
        return [self._stored(row) for row in rows]

    def run_ids(self) -> set[str]:
        return {row["run_id"] for row in self._db.execute("SELECT run_id FROM runs")}

    def _stored(self, row: sqlite3.Row) -> StoredRun:
        rows = self._db.execute("SELECT * FROM replicas WHERE run_id = ?", (row["run_id"],))
        replicas = [_replica(found) for found in rows]
        run = Run(
            run_id=row["run_id"],
            name=row["name"],
            wanted=json.loads(row["wanted_json"]),
            mode=RunMode(row["mode"]),
            state=RunState(row["state"]),
            error=row["error"],
            replicas={replica.key: replica for replica in replicas},
        )
        metrics = json.loads(row["metrics_json"])
        return StoredRun(run, row["spec_json"], row["created"], row["ended"], metrics)


def _head(run: Run) -> tuple[str, str, str, str]:
    return (run.run_id, run.name, run.state, run.mode)


def _row(run_id: str, replica: Replica) -> tuple[Any, ...]:
    unit = replica.unit
    found = (None, None, None) if unit is None else (unit.name, unit.pid, unit.started)
    head = (run_id, replica.service, replica.index, replica.state, replica.phase)
    return (*head, replica.address, replica.restarts, *found)


def _replica(row: sqlite3.Row) -> Replica:
    unit = None if row["unit"] is None else Unit(row["unit"], row["pid"], row["started"])
    return Replica(
        service=row["service"],
        index=row["replica"],
        state=ReplicaState(row["state"]),
        unit=unit,
        phase=row["phase"],
        address=row["address"],
        restarts=row["restarts"],
    )
