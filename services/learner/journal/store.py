"""What the learner must not forget, in one SQLite file under the run's folder.

Every write is durable when it returns. One process at a time holds the journal of a run;
each start begins a new run epoch.
"""

import asyncio
import fcntl
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from services.learner import trajectory as trajectories
from services.learner.groups.types import Ended, GroupSpec, Lease
from services.learner.journal.rows import put_group, record_digest, replayed_version, trajectory_of
from services.learner.journal.schema import (
    PRUNE,
    SCHEMA_VERSION,
    TABLES,
    CheckpointRow,
    Plan,
)
from services.learner.journal.writer import JournalError, Writer, connect
from services.learner.trajectory import Trajectory
from services.learner.types import AttemptKey, CheckpointFiles, PolicyId

T = TypeVar("T")

FILE_NAME = "journal.sqlite"


class ContentConflictError(Exception):
    """Other content was journaled under the same key."""


class Journal:
    """The journal of one run. Use `open_journal`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        self._writer = Writer(path)

    async def close(self) -> None:
        """Finish all writes and let another process have the run."""
        await asyncio.to_thread(self._writer.close)
        self._lock.close()

    async def broken(self) -> None:
        """Wait until the disk refuses a write; raises the JournalError. Nothing is acknowledged
        from then on, so whoever waits for trajectories would wait for ever."""
        await asyncio.wrap_future(self._writer.broken)

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query on a connection of its own, off the event loop."""

        def run() -> T:
            connection = connect(self.path, read_only=True)
            try:
                return query(connection)
            finally:
                connection.close()

        return await asyncio.to_thread(run)

    # --- the run

    async def begin_epoch(self, at_least: int) -> int:
        """Start a new run epoch above every earlier one, forked where the replay will end."""

        def work(db: sqlite3.Connection) -> int:
            (last,) = db.execute("SELECT coalesce(max(run_epoch), 0) FROM epochs").fetchone()
            epoch = max(at_least, last + 1)
            fork = replayed_version(db)
            db.execute("INSERT INTO epochs VALUES (?, ?, ?)", (epoch, fork, time.time()))
            return epoch

        return await self._writer.write(work)

    async def set_meta(self, values: Mapping[str, object]) -> None:
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        await self._writer.write(
            lambda db: db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        )

    async def meta(self) -> dict[str, Any]:
        rows = await self.read(lambda db: db.execute("SELECT key, value FROM meta").fetchall())
        return {key: json.loads(value) for key, value in rows}

    # --- groups, leases, trajectories

    async def leased(self, lease: Lease, incarnation: str, request_id: str, epoch: int) -> None:
        """Note a lease, and its group when that is new."""

        def work(db: sqlite3.Connection) -> None:
            put_group(db, lease.group, leased=True)
            row = (lease.lease_id, lease.group.group_id, lease.worker_id)
            db.execute(
                "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)",
                (*row, incarnation, request_id, epoch),
            )

        await self._writer.write(work)

    async def receive(self, trajectory: Trajectory, dropped: str = "") -> bool:
        """Keep a trajectory; True when it is new. Raises ContentConflictError.

        `dropped` says why it will not be used, when that is known already.
        """
        key = trajectory.key
        digest = trajectories.record_digest(trajectory)
        row = (
            *(key.group_id, key.attempt_index, key.attempt_try),
            *(trajectory.reward, trajectory.failure, digest, trajectory.content_digest),
            *(trajectories.summary(trajectory), trajectories.payload(trajectory), time.time()),
            dropped,
        )

        def work(db: sqlite3.Connection) -> bool:
            known = record_digest(db, key)
            if known is None:
                db.execute("INSERT INTO trajectories VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)
                return True
            if known != digest:
                raise ContentConflictError(f"other content is journaled under {key}")
            return False

        return await self._writer.write(work)

    async def drop_late(self, key: AttemptKey) -> None:
        """Note that a trajectory came when its group needed it no more."""
        await self._execute(
            "UPDATE trajectories SET dropped = 'late'"
            " WHERE group_id = ? AND attempt_index = ? AND try = ? AND dropped = ''",
            (key.group_id, key.attempt_index, key.attempt_try),
        )

    async def record_digest(self, key: AttemptKey) -> bytes | None:
        """Of what is journaled under a key, if anything is."""
        return await self.read(lambda db: record_digest(db, key))

    async def drop_groups(self, ended: Iterable[Ended], requeued: Iterable[GroupSpec] = ()) -> None:
        """Note groups that were dropped, with the groups that replace them."""
        rows = [("dropped", e.reason, e.group.group_id) for e in ended]
        specs = list(requeued)

        def work(db: sqlite3.Connection) -> None:
            db.executemany("UPDATE groups SET state = ?, reason = ? WHERE group_id = ?", rows)
            for spec in specs:
                put_group(db, spec, leased=False)

        await self._writer.write(work)

    async def drop_evals(self, reason: str) -> None:
        """Close the groups of evaluations that did not end."""
        await self._execute(
            "UPDATE groups SET state = 'dropped', reason = ?"
            " WHERE purpose = 'eval' AND state = 'open'",
            (reason,),
        )

    async def load(self, keys: Sequence[AttemptKey]) -> list[Trajectory]:
        """Trajectories with their arrays, in the order of `keys`."""

        def query(db: sqlite3.Connection) -> list[Trajectory]:
            return [trajectory_of(db, key) for key in keys]

        return await self.read(query)

    # --- steps

    async def commit_plan(
        self, plan: Plan, epoch: int, groups: Sequence[str], filtered: Sequence[str]
    ) -> None:
        """Fix what a step trains on, before it runs, and with it the fate of its groups."""
        attempts = json.dumps([[k.group_id, k.attempt_index, k.attempt_try] for k in plan.attempts])
        rows = [("planned", "", plan.step, group_id) for group_id in groups]
        rows += [("filtered", "constant", plan.step, group_id) for group_id in filtered]

        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO plans VALUES (?, ?, ?)", (plan.step, epoch, attempts))
            db.executemany(
                "UPDATE groups SET state = ?, reason = ?, step = ? WHERE group_id = ?", rows
            )

        await self._writer.write(work)

    async def plans_after(self, step: int) -> list[Plan]:
        rows = await self.read(
            lambda db: db.execute(
                "SELECT step, attempts FROM plans WHERE step > ? ORDER BY step", (step,)
            ).fetchall()
        )
        return [Plan(n, tuple(AttemptKey(*key) for key in json.loads(text))) for n, text in rows]

    async def published(self, policy: PolicyId) -> None:
        await self._execute(
            "INSERT OR REPLACE INTO publications VALUES (?, ?, ?)",
            (policy.run_epoch, policy.version, policy.fingerprint),
        )

    async def publications(self) -> list[PolicyId]:
        rows = await self.read(lambda db: db.execute("SELECT * FROM publications").fetchall())
        return [PolicyId(*row) for row in rows]

    async def forks(self) -> dict[int, int]:
        """The version at which each epoch took over, by epoch."""
        sql = "SELECT run_epoch, forked_version FROM epochs"
        return dict(await self.read(lambda db: db.execute(sql).fetchall()))

    # --- checkpoints and evaluations

    async def commit_checkpoint(self, step: int, files: CheckpointFiles, keep: int) -> list[str]:
        """Make a checkpoint the newest; returns the folders that are no longer needed.

        Payloads that the oldest kept checkpoint contains are pruned in the same transaction,
        all but those of each step's first group, which people read. While there are fewer than
        `keep`, the initial policy counts as one, and nothing is pruned.
        """
        row = (step, str(files.directory), json.dumps(dict(files.sha256)), time.time())

        def work(db: sqlite3.Connection) -> list[str]:
            db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", row)
            rows = db.execute("SELECT step, directory FROM checkpoints ORDER BY step DESC")
            found = rows.fetchall()
            kept, old = found[:keep], found[keep:]
            db.executemany("DELETE FROM checkpoints WHERE step = ?", [(n,) for n, _ in old])
            if len(kept) == keep:
                db.execute(PRUNE, (kept[-1][0], kept[-1][0]))
            return [directory for _, directory in old]

        return await self._writer.write(work)

    async def checkpoints(self) -> list[CheckpointRow]:
        """The kept ones, newest first."""
        sql = "SELECT step, directory, files FROM checkpoints ORDER BY step DESC"
        rows = await self.read(lambda db: db.execute(sql).fetchall())
        return [CheckpointRow(n, directory, json.loads(files)) for n, directory, files in rows]

    async def forget_checkpoints(self, steps: Sequence[int]) -> None:
        await self._writer.write(
            lambda db: db.executemany(
                "DELETE FROM checkpoints WHERE step = ?", [(step,) for step in steps]
            )
        )

    async def evaluated(
        self, eval_id: str, moment: str, version: int, results: Mapping[str, Any]
    ) -> None:
        """Keep the results of an evaluation and close its groups."""

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?)",
                (eval_id, moment, version, json.dumps(results)),
            )
            db.execute(
                "UPDATE groups SET state = 'evaluated' WHERE eval_id = ? AND state = 'open'",
                (eval_id,),
            )

        await self._writer.write(work)

    async def evals(self) -> dict[str, dict[str, Any]]:
        """Results by eval id, in order of version."""
        sql = "SELECT eval_id, results FROM evals ORDER BY version"
        rows = await self.read(lambda db: db.execute(sql).fetchall())
        return {eval_id: json.loads(results) for eval_id, results in rows}

    async def _execute(self, sql: str, row: tuple[Any, ...]) -> None:
        await self._writer.write(lambda db: db.execute(sql, row))


def open_journal(run_dir: Path) -> Journal:
    """Open or create the journal of a run. Raises JournalError when it is held or foreign."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE_NAME
    lock = open(run_dir / "journal.lock", "w")  # noqa: SIM115 - held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise JournalError(
            f"another learner works on {run_dir}; stop it, or give this run another folder"
        ) from None
    connection = connect(path)
    try:
        connection.executescript(TABLES)
        connection.execute(
            "INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", (SCHEMA_VERSION,)
        )
        (found,) = connection.execute(
            "SELECT value FROM meta WHERE key = 'schema_version'"
        ).fetchone()
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path} is not a journal: {error}") from None
    finally:
        connection.close()
    if found != SCHEMA_VERSION:
        raise JournalError(f"{path} has schema {found}, this learner writes {SCHEMA_VERSION}")
    return Journal(path, lock)
