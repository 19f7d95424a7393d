"""Thread that does all writes to SQLite, so that no fsync ever blocks the event loop.

Writes that arrive during a commit share the next one: they pay the cost of an fsync once. A
write's future is done when its transaction is on disk.

Each transaction is sealed (see `table_checksums`) and, once it is on disk, recorded in the mark
(see `progress_mark`); only then is it acknowledged.

Every transaction first checks that no newer run epoch has begun: a process that slept while
another took over its run (the lock of the folder is only as good as the file system) is fenced,
and changes nothing any more."""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from services.common.run_folder.journal_file import JournalError, connect_journal
from services.learner.journal.progress_mark import ProgressMark
from services.learner.journal.run_progress import newest_epoch
from services.learner.journal.table_checksums import BrokenSealError, SealUpdater

T = TypeVar("T")

_Work = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]

# Most writes in one transaction, so that the first does not wait for all others.
_MAX_BATCH = 256


class StaleEpochError(JournalError):
    """Another learner has begun a newer epoch of the run: this one must stop."""


class JournalWriter:
    """Runs functions on the journal's only writing connection, in order."""

    def __init__(self, path: Path, mark: ProgressMark) -> None:
        self._path = path
        self._mark = mark
        with closing(connect_journal(path, read_only=True)) as db:
            # Newest epoch when this writer started, and after its own last commit.
            self._epoch = newest_epoch(db)
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._failure: JournalError | None = None
        # Fails with the JournalError when the disk refuses.
        self.broken: Future[None] = Future()
        self.broken.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run_batches, name="journal", daemon=True)
        self._thread.start()

    async def run_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction; return when it is durable.

        Raises what `work` raises, or JournalError if the disk refused. Cancelling the caller
        ends its wait, but the write still happens."""
        if self._failure:
            raise self._failure
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._queue.put((work, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish the queued writes, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run_batches(self) -> None:
        connection = connect_journal(self._path)
        sealing = SealUpdater(connection)
        try:
            while batch := self._next_batch():
                self._commit_batch(connection, sealing, batch)
        finally:
            connection.close()
            self._mark.close()

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

    def _commit_batch(
        self, connection: sqlite3.Connection, sealing: SealUpdater, batch: list[_Work]
    ) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            if self._failure:
                raise sqlite3.OperationalError(str(self._failure))
            connection.execute("BEGIN IMMEDIATE")
            self._check_epoch(connection)
            sealing.begin_transaction()
            for work, future in batch:
                try:
                    done.append((future, _run_in_savepoint(connection, sealing, work)))
                except sqlite3.OperationalError:
                    # A full disk or an I/O error concerns the whole batch.
                    raise
                except Exception as error:  # noqa: BLE001 - it belongs to the caller of this work
                    future.set_exception(error)
            epoch, position = newest_epoch(connection), sealing.seal_transaction()
            connection.execute("COMMIT")
            if position:
                self._mark.note_commit(position)
        except StaleEpochError as error:
            connection.execute("ROLLBACK")
            self._fail_batch(batch, error)
        except (sqlite3.Error, BrokenSealError) as error:
            # After a failed fsync the content of the disk is unknown: stop acknowledging.
            self._fail_batch(batch, JournalError(f"cannot write {self._path}: {error}"))
        except OSError as error:
            self._fail_batch(batch, JournalError(f"cannot write {self._mark.path}: {error}"))
        else:
            self._epoch = epoch
            for future, result in done:
                future.set_result(result)

    def _check_epoch(self, connection: sqlite3.Connection) -> None:
        newest = newest_epoch(connection)
        if newest != self._epoch:
            raise StaleEpochError(
                f"another learner took over {self._path.parent} in epoch {newest}: this one, of"
                f" epoch {self._epoch}, ends and changes nothing any more"
            )

    def _fail_batch(self, batch: list[_Work], error: JournalError) -> None:
        """Fail the queued writes, and every later one."""
        if not self._failure:
            self._failure = error
            self.broken.set_exception(error)
        for _, future in batch:
            if not future.done():
                future.set_exception(self._failure)


def _run_in_savepoint(
    connection: sqlite3.Connection, sealing: SealUpdater, work: Callable[[sqlite3.Connection], T]
) -> T:
    before = sealing.copy_changes()
    connection.execute("SAVEPOINT work")
    try:
        result = work(connection)
    except BaseException:
        connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")
        sealing.roll_back(before)
        raise
    connection.execute("RELEASE work")
    return result
