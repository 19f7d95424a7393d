"""Groups, leases and what came back of them."""

import sqlite3
import time
from collections.abc import Iterable, Sequence

from services.learner import trajectory as trajectories
from services.learner.groups.types import Ended, GroupSpec, Lease
from services.learner.journal.access import Access
from services.learner.journal.rows import put_group, record_digest, trajectory_of
from services.learner.trajectory import Trajectory
from services.learner.types import AttemptKey


class ContentConflictError(Exception):
    """Other content was journaled under the same key."""


class AttemptTables(Access):
    """`groups`, `leases` and `trajectories`."""

    async def leased(self, lease: Lease, incarnation: str, request_id: str, epoch: int) -> None:
        """Note a lease, and its group when that is new."""

        def work(db: sqlite3.Connection) -> None:
            put_group(db, lease.group, leased=True)
            row = (lease.lease_id, lease.group.group_id, lease.worker_id)
            db.execute(
                "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)",
                (*row, incarnation, request_id, epoch),
            )

        await self.write(work)

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

        return await self.write(work)

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

        await self.write(work)

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
