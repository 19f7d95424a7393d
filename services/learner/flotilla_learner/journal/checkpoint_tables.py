"""Journal tables of committed checkpoints and evaluation results."""

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flotilla_learner.journal.schema import PRUNE, PRUNE_PICTURES, PRUNE_SCORES, CheckpointRow
from flotilla_learner.journal.table_access import TableAccess


def put_checkpoint(db: sqlite3.Connection, made: CheckpointRow) -> None:
    """Insert the row that commits a checkpoint."""
    row = (made.step, made.directory, json.dumps(made.files), time.time())
    db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", row)


class ResultTables(TableAccess):
    """`checkpoints` and `evals`."""

    async def commit_checkpoint(
        self, made: CheckpointRow, keep: int, put_in_place: Callable[[], None] | None = None
    ) -> list[str]:
        """Make a checkpoint the newest; return the folders that are no longer needed.

        `put_in_place` renames its folder to the name in the row, inside the transaction: only
        the learner of the newest epoch gets there. If it raises, nothing is committed and the
        exception propagates. The same transaction prunes the payloads that the oldest kept
        checkpoint contains, except those of each step's first group, which people read, and held
        ones. While there are fewer than `keep` checkpoints, the initial policy counts as one, and
        nothing is pruned; nor is anything if all payloads are held."""

        def replace_checkpoints(db: sqlite3.Connection) -> list[str]:
            if put_in_place:
                put_in_place()
            put_checkpoint(db, made)
            rows = db.execute("SELECT step, directory FROM checkpoints ORDER BY step DESC")
            found = rows.fetchall()
            kept, old = found[:keep], found[keep:]
            db.executemany("DELETE FROM checkpoints WHERE step = ?", [(n,) for n, _ in old])
            if len(kept) == keep and not self.holds.keep_all:
                held = json.dumps(sorted(self.holds.find_groups(db)))
                db.execute(PRUNE, (kept[-1][0], kept[-1][0], held))
                db.execute(PRUNE_PICTURES)
                db.execute(PRUNE_SCORES)
            return [directory for _, directory in old]

        return await self.run_transaction(replace_checkpoints)

    async def list_checkpoints(self) -> list[CheckpointRow]:
        """Return the kept checkpoints, newest first."""
        sql = "SELECT step, directory, files FROM checkpoints ORDER BY step DESC"
        rows = await self.run_read(lambda db: db.execute(sql).fetchall())
        return [CheckpointRow(n, directory, json.loads(files)) for n, directory, files in rows]

    async def forget_checkpoints(self, steps: Sequence[int]) -> None:
        await self.run_transaction(
            lambda db: db.executemany(
                "DELETE FROM checkpoints WHERE step = ?", [(step,) for step in steps]
            )
        )

    async def add_evaluation(
        self, eval_id: str, moment: str, version: int, results: Mapping[str, Any]
    ) -> None:
        """Store the results of an evaluation and close its groups."""

        def insert_evaluation(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?)",
                (eval_id, moment, version, json.dumps(results)),
            )
            db.execute(
                "UPDATE groups SET state = 'evaluated' WHERE eval_id = ? AND state = 'open'",
                (eval_id,),
            )

        await self.run_transaction(insert_evaluation)

    async def load_eval_results(self) -> dict[str, dict[str, Any]]:
        """Return results by eval id, in version order."""
        sql = "SELECT eval_id, results FROM evals ORDER BY version"
        rows = await self.run_read(lambda db: db.execute(sql).fetchall())
        return {eval_id: json.loads(results) for eval_id, results in rows}


def evaluated_versions(db: sqlite3.Connection) -> set[int]:
    """Return the policy versions of all finished evaluations."""
    return {version for (version,) in db.execute("SELECT version FROM evals")}
