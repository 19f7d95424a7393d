"""The front door's journal: one connection, and one thread that does all that touches it.

Transactions that arrive during a commit share the next one, so that a thousand orders cost a few
fsyncs. Reads go the same way: nothing here waits for a disk on the event loop."""

import asyncio
import fcntl
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from services.tinker.store.schema import STORE_FILE, StoreError, open_store_file

T = TypeVar("T")

_Work = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]
_LOCK = "tinker.lock"
# Most transactions in one commit, so that the first does not wait for all others.
_MAX_BATCH = 256


class Store:
    """Runs functions on the journal's connection, in order. One process at a time holds it."""

    def __init__(self, folder: Path) -> None:
        """Open the journal of a folder. Raises StoreError if another process holds it, or if it
        cannot be used."""
        self.folder = folder = folder.absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = open(folder / _LOCK, "w")  # noqa: SIM115 - held until `close`
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = open_store_file(folder / STORE_FILE)
        except BlockingIOError:
            self._lock.close()
            raise StoreError(f"another server works on {folder}; stop it first") from None
        except BaseException:
            self._lock.close()
            raise
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._failure: StoreError | None = None
        # Fails with the StoreError when the disk refuses.
        self.broken: Future[None] = Future()
        self.broken.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run_batches, name="tinker-store", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction; return when it is durable.

        Raises what `work` raises, or StoreError if the disk refused. Cancelling the caller ends
        its wait, but the transaction still happens."""
        if self._failure:
            raise self._failure
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._queue.put((work, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish what is queued, and let another process have the journal."""
        self._queue.put(None)
        self._thread.join()
        self._db.close()
        self._lock.close()

    def _run_batches(self) -> None:
        while batch := self._next_batch():
            self._commit_batch(batch)

    def _next_batch(self) -> list[_Work]:
        first = self._queue.get()
        batch: list[_Work] = [] if first is None else [first]
        while batch and len(batch) < _MAX_BATCH and not self._queue.empty():
            work = self._queue.get()
            if work is None:
                self._queue.put(None)
                break
            batch.append(work)
        return batch

    def _commit_batch(self, batch: list[_Work]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            if self._failure:
                raise sqlite3.OperationalError(str(self._failure))
            self._db.execute("BEGIN IMMEDIATE")
            for work, future in batch:
                try:
                    done.append((future, self._run_in_savepoint(work)))
                except sqlite3.OperationalError:
                    # A full disk or an I/O error concerns the whole batch.
                    raise
                except Exception as error:  # noqa: BLE001 - it belongs to the caller of this work
                    future.set_exception(error)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            # After a failed fsync the content of the disk is unknown: stop acknowledging.
            self._fail(batch, StoreError(f"cannot write {self.folder / STORE_FILE}: {error}"))
        else:
            for future, result in done:
                future.set_result(result)

    def _run_in_savepoint(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._db.execute("SAVEPOINT work")
        try:
            result = work(self._db)
        except BaseException:
            self._db.execute("ROLLBACK TO work")
            self._db.execute("RELEASE work")
            raise
        self._db.execute("RELEASE work")
        return result

    def _fail(self, batch: list[_Work], error: StoreError) -> None:
        """Fail the queued transactions, and every later one."""
        if not self._failure:
            self._failure = error
            self.broken.set_exception(error)
        for _, future in batch:
            if not future.done():
                future.set_exception(self._failure)
