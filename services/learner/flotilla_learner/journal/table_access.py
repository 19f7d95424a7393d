"""Access shared by all tables of the journal, for reading and writing."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from flotilla_common.run_folder.journal_file import JournalError, connect_journal
from flotilla_learner.journal.disk_incidents import Incidents
from flotilla_learner.journal.holds import JournalHolds
from flotilla_learner.journal.progress_mark import ProgressMark
from flotilla_learner.journal.writer import JournalWriter

T = TypeVar("T")


class TableAccess:
    """One journal file: each read has its own connection, all writes go through one thread."""

    def __init__(self, path: Path, mark: ProgressMark) -> None:
        self.path = path
        self.incidents = Incidents()
        self.holds = JournalHolds(path.parent)
        self._writer = JournalWriter(path, mark)

    async def run_read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query on a connection of its own, off the event loop."""

        def query_file() -> T:
            try:
                with closing(connect_journal(self.path, read_only=True)) as connection:
                    return query(connection)
            except sqlite3.DatabaseError as error:
                raise JournalError(f"cannot read {self.path}: {error}") from error

        return await asyncio.to_thread(query_file)

    async def run_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction of the writing thread; return when it is durable."""
        return await self._writer.run_transaction(work)

    async def run_fenced(self, work: Callable[[], T]) -> T:
        """Run `work` while no other process can begin an epoch, and only if none has."""
        return await self._writer.run_transaction(lambda db: work())

    async def _execute_sql(self, sql: str, row: tuple[Any, ...]) -> None:
        await self.run_transaction(lambda db: db.execute(sql, row))
