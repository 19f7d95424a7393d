"""Groups, leases and what came back of them."""

import sqlite3
from collections.abc import Iterable, Sequence

from services.learner import trajectory as trajectories
from services.learner.groups.types import Ended, GroupSpec, Lease
from services.learner.journal.curriculum import Snapshot, put_snapshot
from services.learner.journal.integrity import DamagedRecordError
from services.learner.journal.quarantine import DAMAGED, put_in_quarantine
from services.learner.journal.row_codec import put_group, record_digest
from services.learner.journal.table_access import Access
from services.learner.journal.trajectories import (
    put_trajectory,
    trajectories_of,
    trajectory_row,
)
from services.learner.trajectory import Trajectory
from services.learner.types import AttemptKey


class ContentConflictError(Exception):
    """Other content was journaled under the same key."""


class AttemptTables(Access):
    """`groups`, `leases` and `trajectories`."""

    async def leased(
        self,
        lease: Lease,
        incarnation: str,
        request_id: str,
        epoch: int,
        drawn: Iterable[GroupSpec] = (),
    ) -> None:
        """Note a lease, and its group and those that were `drawn` before it when they are new."""

        def work(db: sqlite3.Connection) -> None:
            for spec in drawn:
                put_group(db, spec, leased=False)
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
        row = trajectory_row(trajectory, digest)

        def work(db: sqlite3.Connection) -> bool:
            known = record_digest(db, key)
            if known is None:
                put_trajectory(db, row, dropped)
                return True
            if known != digest:
                raise ContentConflictError(f"other content is journaled under {key}")
            return False

        return await self.write(work)

    async def drop_try(self, key: AttemptKey, reason: str) -> None:
        """Note why a trajectory that is journaled is not used after all."""
        await self._execute(
            "UPDATE trajectories SET dropped = ?"
            " WHERE group_id = ? AND attempt_index = ? AND try = ? AND dropped = ''",
            (reason, key.group_id, key.attempt_index, key.attempt_try),
        )

    async def record_digest(self, key: AttemptKey) -> bytes | None:
        """Of what is journaled under a key, if anything is."""
        return await self.read(lambda db: record_digest(db, key))

    async def end_groups(
        self,
        dropped: Iterable[Ended],
        requeued: Iterable[GroupSpec] = (),
        filtered: Iterable[str] = (),
        snapshot: Snapshot | None = None,
    ) -> None:
        """Note groups that were dropped, with the groups that replace them; those that were
        `filtered` for want of signal; and what the curriculum makes of it."""
        rows = [("dropped", e.reason, e.group.group_id) for e in dropped]
        constant = [(group_id,) for group_id in filtered]
        specs = list(requeued)

        def work(db: sqlite3.Connection) -> None:
            db.executemany("UPDATE groups SET state = ?, reason = ? WHERE group_id = ?", rows)
            db.executemany(
                "UPDATE groups SET state = 'filtered', reason = 'constant' WHERE group_id = ?",
                constant,
            )
            for spec in specs:
                put_group(db, spec, leased=False)
            if snapshot:
                put_snapshot(db, snapshot)

        await self.write(work)

    async def drop_evals(self, reason: str) -> None:
        """Close the groups of evaluations that did not end."""
        await self._execute(
            "UPDATE groups SET state = 'dropped', reason = ?"
            " WHERE purpose = 'eval' AND state = 'open'",
            (reason,),
        )

    async def load(self, keys: Sequence[AttemptKey]) -> list[Trajectory]:
        """Trajectories with their arrays, in the order of `keys`.

        Raises DamagedRecordError when any is not what was written.
        """

        def query(db: sqlite3.Connection) -> list[Trajectory]:
            found, damaged = trajectories_of(db, keys)
            if damaged:
                raise DamagedRecordError(damaged)
            return found

        return await self.read(query)

    async def load_intact(self, keys: Sequence[AttemptKey]) -> list[Trajectory]:
        """Like `load`, but groups with damaged records are put in quarantine and left out."""
        try:
            return await self.load(keys)
        except DamagedRecordError as error:
            damaged = error.keys
        await self.quarantine(damaged)
        groups = {key.group_id for key in damaged}
        return await self.load([key for key in keys if key.group_id not in groups])

    async def damaged(self, keys: Sequence[AttemptKey]) -> list[AttemptKey]:
        """Those of `keys` whose record is not what was written."""
        return await self.read(lambda db: trajectories_of(db, keys)[1])

    async def quarantine(self, keys: Sequence[AttemptKey]) -> None:
        """Keep damaged records from ever being trained on: their groups are dropped, and taken
        out of the plans that name them. An incident."""
        groups = sorted({key.group_id for key in keys})
        await self.write(lambda db: put_in_quarantine(db, keys, groups))
        self.incidents.report("corrupt_record", DAMAGED, groups)
