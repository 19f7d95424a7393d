"""One thread that writes to SQLite, so that no fsync ever stops the event loop.

Writes that arrive while a commit is under way share the next one: the cost of an fsync is
paid once for all of them. A write's future is done when its transaction is on the disk.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_Work = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]

# What one transaction may hold, so that the first in line does not wait for all others.
_MAX_BATCH = 256


class JournalError(Exception):
    """The journal could not be opened or written; nothing after it was acknowledged."""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection whose commits are on the disk when they return."""
    uri = f"{path.absolute().as_uri()}{'?mode=ro' if read_only else ''}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
    if not read_only:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    return connection


class Writer:
    """Runs functions on the journal's one writing connection, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._failure: JournalError | None = None
        # Ends with the JournalError when the disk refuses.
        self.broken: Future[None] = Future()
        self.broken.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction; returns when it is durable.

        Raises what `work` raises, or JournalError when the disk refused. A caller that is
        cancelled no longer waits, but the write happens all the same.
        """
        if self._failure:
            raise self._failure
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._queue.put((work, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish what was asked for, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        connection = connect(self._path)
        try:
            while batch := self._next_batch():
                self._commit(connection, batch)
        finally:
            connection.close()

    def _next_batch(self) -> list[_Work]:
        first = self._queue.get()
        if first is None:
            return []
        batch = [first]
        while len(batch) < _MAX_BATCH:
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                break
            if work is None:
                self._queue.put(None)
                break
            batch.append(work)
        return batch

    def _commit(self, connection: sqlite3.Connection, batch: list[_Work]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            if self._failure:
                raise sqlite3.OperationalError(str(self._failure))
            connection.execute("BEGIN IMMEDIATE")
            for work, future in batch:
                try:
                    done.append((future, _savepoint(connection, work)))
                except sqlite3.OperationalError:
                    # A full disk, an I/O error: everybody's.
                    raise
                except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                    future.set_exception(error)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            # After a failed fsync nobody knows what is on the disk: stop acknowledging.
            if not self._failure:
                self._failure = JournalError(f"cannot write {self._path}: {error}")
                self.broken.set_exception(self._failure)
            for _, future in batch:
                if not future.done():
                    future.set_exception(self._failure)
            return
        for future, result in done:
            future.set_result(result)


def _savepoint(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    connection.execute("SAVEPOINT work")
    try:
        result = work(connection)
    except BaseException:
        connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")
        raise
    connection.execute("RELEASE work")
    return result
