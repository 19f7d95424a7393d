"""Journal tables of run epochs, step plans and publications."""

import sqlite3
import time
from collections.abc import Mapping, Sequence

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.policy import PolicyId
from flotilla_learner.journal.curriculum_tables import CurriculumSnapshot, put_snapshot
from flotilla_learner.journal.plan_tables import plans_after, put_plan
from flotilla_learner.journal.run_progress import newest_epoch, replayed_version
from flotilla_learner.journal.schema import Plan
from flotilla_learner.journal.table_access import TableAccess
from flotilla_learner.journal.teacher_tables import AttemptScores, put_scores, scores_of


class StepTables(TableAccess):
    """`epochs`, `plans`, `teacher_scores` and `publications`."""

    async def begin_epoch(self, at_least: int) -> int:
        """Start a new run epoch above every earlier one, forked at the version where the replay
        will end."""

        def insert_epoch(db: sqlite3.Connection) -> int:
            epoch = max(at_least, newest_epoch(db) + 1)
            fork = replayed_version(db)
            db.execute("INSERT INTO epochs VALUES (?, ?, ?)", (epoch, fork, time.time()))
            return epoch

        return await self.run_transaction(insert_epoch)

    async def commit_plan(
        self,
        plan: Plan,
        epoch: int,
        groups: Sequence[str],
        filtered: Sequence[str],
        snapshot: CurriculumSnapshot | None = None,
        scores: Mapping[AttemptKey, AttemptScores] | None = None,
    ) -> None:
        """Commit the attempts of a step before it runs, with the fate of its groups, the resulting
        curriculum snapshot, and what a teacher says about the attempts."""
        rows = [("planned", "", plan.step, group_id) for group_id in groups]
        rows += [("filtered", "constant", plan.step, group_id) for group_id in filtered]

        def insert_plan(db: sqlite3.Connection) -> None:
            if snapshot:
                put_snapshot(db, snapshot)
            put_plan(db, plan, epoch)
            for key, own in (scores or {}).items():
                put_scores(db, key, own)
            db.executemany(
                "UPDATE groups SET state = ?, reason = ?, step = ? WHERE group_id = ?", rows
            )

        await self.run_transaction(insert_plan)

    async def plans_after(self, step: int) -> list[Plan]:
        """Load the plans of later steps, in order. Raises JournalError if one is damaged."""
        return await self.run_read(lambda db: plans_after(db, step))

    async def load_scores(self, keys: Sequence[AttemptKey]) -> dict[AttemptKey, AttemptScores]:
        """Load a teacher's scores of attempts. Raises JournalError if any are missing or
        damaged."""
        return await self.run_read(lambda db: scores_of(db, keys))

    async def add_publication(self, policy: PolicyId) -> None:
        await self._execute_sql(
            "INSERT OR REPLACE INTO publications VALUES (?, ?, ?)",
            (policy.run_epoch, policy.version, policy.fingerprint),
        )

    async def list_publications(self) -> list[PolicyId]:
        rows = await self.run_read(lambda db: db.execute("SELECT * FROM publications").fetchall())
        return [PolicyId(*row) for row in rows]

    async def load_forks(self) -> dict[int, int]:
        """Return the version at which each epoch took over, by epoch."""
        sql = "SELECT run_epoch, forked_version FROM epochs"
        return dict(await self.run_read(lambda db: db.execute(sql).fetchall()))
