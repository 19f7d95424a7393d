"""The launcher's ledger: runs, replicas, their events and the requests to backends, in one
SQLite file.

WAL with synchronous=FULL: commits must survive a power loss, because machines elsewhere do."""

import json
import sqlite3
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_launcher.run_progress import Progress
from flotilla_launcher.state import Cleanup, Replica, Run
from flotilla_launcher.store.operation_log import OperationLog
from flotilla_launcher.store.row_codec import (
    RunEvent,
    StoredRun,
    alarms_to_json,
    replica_to_json,
    run_to_json,
    stored_run_from_row,
)
from flotilla_launcher.store.schema import LedgerError, open_ledger
from flotilla_launcher.store.write_transaction import write_transaction

__all__ = ["PROGRESS_KEPT", "Ledger", "LedgerError", "RunEvent", "StoredRun"]

# Progress events kept per run; all other events are kept for ever.
PROGRESS_KEPT = 5_000


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Choice of runs: in one of these states, if there are any; of the spec with this name, which
    may have the wildcards `*` and `?`; created at this time or later."""

    states: tuple[str, ...] = ()
    name: str = ""
    since: float = 0.0


EVERY_RUN = RunFilter()


class Ledger:
    """Access to the ledger. Calls block for a few milliseconds.

    Raises LedgerError for a ledger of another format, or one that cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Why the last transaction failed; empty if it was written.
        self.write_problem = ""
        self._db = open_ledger(path)
        self._db.row_factory = sqlite3.Row
        self.operations = OperationLog(self._db)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Run the block as one transaction; roll back on any exception."""
        try:
            with write_transaction(self._db):
                yield
        except sqlite3.OperationalError as error:
            self.write_problem = f"{self._path} cannot be written: {error}"
            raise
        self.write_problem = ""

    def get_request(self, request_id: str) -> tuple[str, str] | None:
        """Return the digest and run id of an answered StartRun."""
        row = self._db.execute(
            "SELECT digest, run_id FROM requests WHERE request_id = ?", (request_id,)
        ).fetchone()
        return None if row is None else (row["digest"], row["run_id"])

    def save_request(self, request_id: str, digest: str, run_id: str) -> None:
        """Save the answer to a StartRun."""
        self._db.execute("INSERT INTO requests VALUES (?, ?, ?)", (request_id, digest, run_id))

    def begin_run(
        self, run: Run, spec_json: str, now: float, prices: Mapping[str, float] | None = None
    ) -> None:
        """Write a run that starts or resumes."""
        self._db.execute(
            "INSERT INTO runs (run_id, run_json, spec_json, prices_json, created, begun)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (run_id) DO UPDATE SET"
            " run_json = excluded.run_json, spec_json = excluded.spec_json,"
            " prices_json = excluded.prices_json, begun = excluded.begun, registry = '',"
            " ended = NULL",
            (run.run_id, run_to_json(run), spec_json, json.dumps(dict(prices or {})), now, now),
        )
        self._db.execute("DELETE FROM replicas WHERE run_id = ?", (run.run_id,))

    def save_begin(self, run_id: str, now: float) -> None:
        """Record when a run that waited in the queue began."""
        self._db.execute("UPDATE runs SET begun = ? WHERE run_id = ?", (now, run_id))

    def forget_run(self, run_id: str, digest: str) -> None:
        """Remove all rows of a run that never began; its request has `digest` from now on."""
        with self.transaction():
            for table in ("replicas", "events", "operations", "runs"):
                self._db.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))
            self._db.execute(
                "UPDATE requests SET digest = ?, run_id = '' WHERE run_id = ?", (digest, run_id)
            )

    def save_run(self, run: Run, replicas: Iterable[Replica], ended: float | None) -> None:
        """Write a run's row and its changed replicas. The end time is set only once."""
        self._db.execute(
            "UPDATE runs SET run_json = ?, ended = iif(? IS NULL, NULL, coalesce(ended, ?))"
            " WHERE run_id = ?",
            (run_to_json(run), ended, ended, run.run_id),
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?)",
            [(run.run_id, *each.key, replica_to_json(each)) for each in replicas],
        )

    def save_progress(self, run_id: str, progress: Progress) -> None:
        """Store the latest progress that a learner reported."""
        latest = (json.dumps(dict(progress.metrics)), alarms_to_json(progress.alarms))
        self._db.execute(
            "UPDATE runs SET metrics_json = ?, alarms_json = ?, step = ?, total_steps = ?"
            " WHERE run_id = ?",
            (*latest, progress.step, progress.total_steps, run_id),
        )

    def save_registry(self, run_id: str, address: str) -> None:
        """Store the address of the run's registry."""
        self._db.execute("UPDATE runs SET registry = ? WHERE run_id = ?", (address, run_id))

    def add_event(self, run_id: str, now: float, kind: str, body: Mapping[str, Any]) -> int:
        """Append an event and return its number; drop the oldest progress events."""
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

    def list_events(self, run_id: str, after: int, limit: int = 200) -> list[RunEvent]:
        found = self._db.execute(
            "SELECT event, time, kind, body FROM events WHERE run_id = ? AND event > ?"
            " ORDER BY event LIMIT ?",
            (run_id, after, limit),
        ).fetchall()
        return [RunEvent(r["event"], r["time"], r["kind"], json.loads(r["body"])) for r in found]

    def has_trained(self, run_id: str) -> bool:
        """Return whether the run's learner ever reported a step."""
        row = self._db.execute(
            "SELECT 1 FROM events WHERE run_id = ? AND kind = 'progress'"
            " AND json_extract(body, '$.step') > 0 LIMIT 1",
            (run_id,),
        ).fetchone()
        return row is not None

    def list_unpublished(self) -> dict[str, int]:
        """Return the last published event of each run that has later ones."""
        found = self._db.execute("SELECT run_id, told FROM runs WHERE told < next_event - 1")
        return {row["run_id"]: row["told"] for row in found}

    def mark_published(self, run_id: str, number: int) -> None:
        """Record that observers have received this event and all before it."""
        self._db.execute("UPDATE runs SET told = ? WHERE run_id = ?", (number, run_id))

    def get_run(self, run_id: str) -> StoredRun | None:
        return next(iter(self._list_runs("WHERE run_id = ?", run_id)), None)

    def list_newest(
        self, chosen: RunFilter = EVERY_RUN, *, after: str = "", limit: int = -1
    ) -> list[StoredRun]:
        """Return the chosen runs, newest first: all, or up to `limit` that are older than the run
        `after`."""
        clause, values = _where(chosen, after)
        order = "ORDER BY created DESC, run_id DESC LIMIT ?"
        return self._list_runs(f"{clause} {order}", *values, limit)

    def count_runs(self, chosen: RunFilter = EVERY_RUN, *, after: str = "") -> int:
        """Count the runs that `list_newest` returns without a limit."""
        clause, values = _where(chosen, after)
        found = self._db.execute(f"SELECT count(*) FROM runs {clause}", values).fetchone()
        return int(found[0])

    def list_backends(self) -> set[str]:
        """Return the backends of all runs."""
        found = self._db.execute("SELECT DISTINCT json_extract(run_json, '$.backend') FROM runs")
        return {row[0] for row in found}

    def list_unended(self) -> list[StoredRun]:
        """Return the runs that have not ended, of any age."""
        return self._list_runs("WHERE ended IS NULL")

    def list_suspects(self, backend: str) -> list[StoredRun]:
        """Return the ended runs that may have left resources behind."""
        return self._list_runs(
            "WHERE ended IS NOT NULL AND json_extract(run_json, '$.backend') = ?"
            " AND json_extract(run_json, '$.cleanup') = ?",
            *(backend, Cleanup.LEAK_SUSPECTED),
        )

    def list_run_ids(self) -> set[str]:
        return {row["run_id"] for row in self._db.execute("SELECT run_id FROM runs")}

    def _list_runs(self, clauses: str, *values: str | float) -> list[StoredRun]:
        found = self._db.execute(f"SELECT * FROM runs {clauses}", values).fetchall()
        return [self._load_stored_run(row) for row in found]

    def _load_stored_run(self, row: sqlite3.Row) -> StoredRun:
        found = self._db.execute("SELECT * FROM replicas WHERE run_id = ?", (row["run_id"],))
        return stored_run_from_row(row, found)


def _where(chosen: RunFilter, after: str) -> tuple[str, list[str | float]]:
    """Return the condition of a choice of runs, and its values."""
    clauses: list[str] = []
    values: list[str | float] = []
    if chosen.states:
        marks = ", ".join("?" * len(chosen.states))
        clauses.append(f"json_extract(run_json, '$.state') IN ({marks})")
        values += chosen.states
    if chosen.name:
        clauses.append("json_extract(run_json, '$.name') GLOB ?")
        values.append(chosen.name.replace("[", "[[]"))
    if chosen.since:
        clauses.append("created >= ?")
        values.append(chosen.since)
    if after:
        clauses.append("(created, run_id) < (SELECT created, run_id FROM runs WHERE run_id = ?)")
        values.append(after)
    return (f"WHERE {' AND '.join(clauses)}" if clauses else ""), values
