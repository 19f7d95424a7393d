"""Journal tables of groups, leases and their trajectories."""

import sqlite3
from collections.abc import Iterable, Sequence

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.run_folder.picture_tables import put_pictures, whole_trajectories_of
from flotilla_common.run_folder.record_digests import DamagedRecordError
from flotilla_common.run_folder.trajectory_tables import (
    put_tools,
    put_trajectory,
    record_digest,
    trajectory_row,
)
from flotilla_learner.group_types import EndedGroup, GroupSpec, GroupVerdict, Lease
from flotilla_learner.journal.curriculum_tables import CurriculumSnapshot, put_snapshot
from flotilla_learner.journal.damaged_groups import DAMAGED, put_in_quarantine
from flotilla_learner.journal.row_codec import put_group
from flotilla_learner.journal.table_access import TableAccess
from flotilla_learner.journal.verdict_tables import count_calls, put_verdict


class AttemptTables(TableAccess):
    """`groups`, `leases`, `trajectories` and `verdicts`."""

    async def add_lease(
        self,
        lease: Lease,
        incarnation: str,
        request_id: str,
        epoch: int,
        drawn: Iterable[GroupSpec] = (),
    ) -> None:
        """Add a lease, with its group and the groups `drawn` before it that are new to the
        journal."""

        def insert_lease(db: sqlite3.Connection) -> None:
            for spec in drawn:
                put_group(db, spec, leased=False)
            put_group(db, lease.group, leased=True)
            row = (lease.lease_id, lease.group.group_id, lease.worker_id)
            db.execute(
                "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)",
                (*row, incarnation, request_id, epoch),
            )

        await self.run_transaction(insert_lease)

    async def add_trajectory(self, trajectory: Trajectory, dropped: str = "") -> bool:
        """Add a trajectory with its pictures; return True if it is new. Raises
        ContentConflictError, PictureMissingError, or ValueError for a picture with another grid.

        `dropped` is the reason why it will not be used, if already known."""
        row, digest = trajectory_row(trajectory), trajectory.facts.tool_schema_digest

        def insert_trajectory(db: sqlite3.Connection) -> bool:
            if trajectory.tools:
                put_tools(db, digest, trajectory.tools)
            new = put_trajectory(db, row, dropped)
            if new:
                put_pictures(db, trajectory)
            return new

        return await self.run_transaction(insert_trajectory)

    async def add_verdict(self, verdict: GroupVerdict, keys: Sequence[AttemptKey]) -> None:
        """Add what a judge says about the attempts `keys` of a group, and give them their scores,
        at once: there is one verdict for a group, ever. Raises DamagedRecordError."""
        await self.run_transaction(lambda db: put_verdict(db, verdict, keys))

    async def count_judge_calls(self) -> int:
        """Return how many answers of a judge the run has had."""
        return await self.run_read(count_calls)

    async def drop_try(self, key: AttemptKey, reason: str) -> None:
        """Record why a journaled trajectory is not used after all."""
        await self._execute_sql(
            "UPDATE trajectories SET dropped = ?"
            " WHERE group_id = ? AND attempt_index = ? AND try = ? AND dropped = ''",
            (reason, key.group_id, key.attempt_index, key.attempt_try),
        )

    async def has_try(self, key: AttemptKey) -> bool:
        """Return True if a trajectory is journaled under a key."""
        return await self.run_read(lambda db: record_digest(db, key) is not None)

    async def end_groups(
        self,
        dropped: Iterable[EndedGroup],
        requeued: Iterable[GroupSpec] = (),
        filtered: Iterable[str] = (),
        snapshot: CurriculumSnapshot | None = None,
    ) -> None:
        """Record how groups ended: the dropped ones with their replacements, those
        `filtered` for lack of signal, and the resulting curriculum snapshot."""
        rows = [("dropped", e.reason, e.group.group_id) for e in dropped]
        without_signal = [(group_id,) for group_id in filtered]
        specs = list(requeued)

        def update_groups(db: sqlite3.Connection) -> None:
            db.executemany("UPDATE groups SET state = ?, reason = ? WHERE group_id = ?", rows)
            db.executemany(
                "UPDATE groups SET state = 'filtered', reason = 'constant' WHERE group_id = ?",
                without_signal,
            )
            for spec in specs:
                put_group(db, spec, leased=False)
            if snapshot:
                put_snapshot(db, snapshot)

        await self.run_transaction(update_groups)

    async def drop_evals(self, reason: str) -> None:
        """Close the groups of unfinished evaluations."""
        await self._execute_sql(
            "UPDATE groups SET state = 'dropped', reason = ?"
            " WHERE purpose = 'eval' AND state = 'open'",
            (reason,),
        )

    async def load_trajectories(self, keys: Sequence[AttemptKey]) -> list[Trajectory]:
        """Load trajectories with their arrays and pictures, in the order of `keys`.

        Raises DamagedRecordError if any differs from what was written."""

        def query_trajectories(db: sqlite3.Connection) -> list[Trajectory]:
            found, damaged = whole_trajectories_of(db, keys)
            if damaged:
                raise DamagedRecordError(damaged)
            return found

        return await self.run_read(query_trajectories)

    async def load_intact(self, keys: Sequence[AttemptKey]) -> list[Trajectory]:
        """Load trajectories like `load_trajectories`, but quarantine and skip groups with damaged
        records."""
        try:
            return await self.load_trajectories(keys)
        except DamagedRecordError as error:
            damaged = error.keys
        await self.quarantine_records(damaged)
        groups = {key.group_id for key in damaged}
        return await self.load_trajectories([key for key in keys if key.group_id not in groups])

    async def find_damaged(self, keys: Sequence[AttemptKey]) -> list[AttemptKey]:
        """Return those of `keys` whose record differs from what was written."""
        return await self.run_read(lambda db: whole_trajectories_of(db, keys)[1])

    async def quarantine_records(self, keys: Sequence[AttemptKey]) -> None:
        """Exclude damaged records from training for good and report an incident.

        Their groups are dropped, and removed from the plans that name them."""
        groups = await self.run_transaction(lambda db: put_in_quarantine(db, keys))
        self.incidents.report_incident("corrupt_record", DAMAGED, groups)
