"""How all tables of the journal are read and written."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from services.learner.journal.connection import JournalError, connect
from services.learner.journal.disk_incidents import Incidents
from services.learner.journal.progress_mark import Mark
from services.learner.journal.writer import Writer

T = TypeVar("T")


class Access:
    """One journal file: reads on connections of their own, writes through one thread."""

    def __init__(self, path: Path, mark: Mark) -> None:
        self.path = path
        self.incidents = Incidents()
        self._writer = Writer(path, mark)

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query on a connection of its own, off the event loop."""

        def run() -> T:
            try:
                with closing(connect(self.path, read_only=True)) as connection:
                    return query(connection)
            except sqlite3.DatabaseError as error:
                raise JournalError(f"cannot read {self.path}: {error}") from error

        return await asyncio.to_thread(run)

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction of the writing thread; returns when it is durable."""
        return await self._writer.write(work)

    async def fenced(self, work: Callable[[], T]) -> T:
        """Run `work` while no other process can begin an epoch, and only if none has."""
        return await self._writer.write(lambda db: work())

    async def _execute(self, sql: str, row: tuple[Any, ...]) -> None:
        await self.write(lambda db: db.execute(sql, row))
