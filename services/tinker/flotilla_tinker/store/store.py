"""The front door's journal: one connection, and one thread that does all that touches it.

Transactions that arrive during a commit share the next one, so that a thousand orders cost a few
fsyncs. Reads go the same way: nothing here waits for a disk on the event loop."""

import fcntl
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from flotilla_common.files.commit_thread import Batch, CommitThread, run_each
from flotilla_tinker.store.schema import STORE_FILE, StoreError, open_store_file

T = TypeVar("T")

_LOCK = "tinker.lock"


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
        self._commits = CommitThread("tinker-store", self._commit_batch)
        # Fails with the StoreError when the disk refuses.
        self.broken = self._commits.broken

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction; return when it is durable.

        Raises what `work` raises, or StoreError if the disk refused. Cancelling the caller ends
        its wait, but the transaction still happens."""
        return await self._commits.run(work)

    def close(self) -> None:
        """Finish what is queued, and let another process have the journal."""
        self._commits.close()
        self._db.close()
        self._lock.close()

    def _commit_batch(self, batch: Batch) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            done = run_each(batch, partial(_run_in_savepoint, self._db))
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(f"cannot write {self.folder / STORE_FILE}: {error}") from error
        for future, result in done:
            future.set_result(result)


def _run_in_savepoint(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    db.execute("SAVEPOINT work")
    try:
        result = work(db)
    except BaseException:
        db.execute("ROLLBACK TO work")
        db.execute("RELEASE work")
        raise
    db.execute("RELEASE work")
    return result
