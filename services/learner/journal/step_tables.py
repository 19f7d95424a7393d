"""Run epochs, step plans and publications."""

import sqlite3
import time
from collections.abc import Sequence

from services.learner.journal.curriculum import Snapshot, put_snapshot
from services.learner.journal.plans import plans_after, put_plan
from services.learner.journal.row_codec import replayed_version
from services.learner.journal.schema import Plan
from services.learner.journal.table_access import Access
from services.learner.types import PolicyId


class StepTables(Access):
    """`epochs`, `plans` and `publications`."""

    async def begin_epoch(self, at_least: int) -> int:
        """Start a new run epoch above every earlier one, forked where the replay will end."""

        def work(db: sqlite3.Connection) -> int:
            (last,) = db.execute("SELECT coalesce(max(run_epoch), 0) FROM epochs").fetchone()
            epoch = max(at_least, last + 1)
            fork = replayed_version(db)
            db.execute("INSERT INTO epochs VALUES (?, ?, ?)", (epoch, fork, time.time()))
            return epoch

        return await self.write(work)

    async def commit_plan(
        self,
        plan: Plan,
        epoch: int,
        groups: Sequence[str],
        filtered: Sequence[str],
        snapshot: Snapshot | None = None,
    ) -> None:
        """Fix what a step trains on, before it runs, and with it the fate of its groups and what
        the curriculum makes of them."""
        rows = [("planned", "", plan.step, group_id) for group_id in groups]
        rows += [("filtered", "constant", plan.step, group_id) for group_id in filtered]

        def work(db: sqlite3.Connection) -> None:
            if snapshot:
                put_snapshot(db, snapshot)
            put_plan(db, plan, epoch)
            db.executemany(
                "UPDATE groups SET state = ?, reason = ?, step = ? WHERE group_id = ?", rows
            )

        await self.write(work)

    async def plans_after(self, step: int) -> list[Plan]:
        """In order. Raises JournalError when one is not what was written."""
        return await self.read(lambda db: plans_after(db, step))

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
