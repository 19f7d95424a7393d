"""The journal's only writer: every transaction is sealed (see `table_checksums`) and, once it is on
disk, recorded in the mark (see `progress_mark`); only then is it acknowledged.

Every transaction first checks that no newer run epoch has begun: a process that slept while
another took over its run (the lock of the folder is only as good as the file system) is fenced,
and changes nothing any more."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flotilla_common.files.commit_thread import Batch, CommitThread, run_each
from flotilla_common.run_folder.journal_file import JournalError, connect_journal
from flotilla_learner.journal.progress_mark import ProgressMark
from flotilla_learner.journal.run_progress import newest_epoch
from flotilla_learner.journal.table_checksums import BrokenSealError, SealUpdater

T = TypeVar("T")


class StaleEpochError(JournalError):
    """Another learner has begun a newer epoch of the run: this one must stop."""


class JournalWriter:
    """Runs functions on the journal's only writing connection, in order."""

    def __init__(self, path: Path, mark: ProgressMark) -> None:
        self._path = path
        self._mark = mark
        self._db = connect_journal(path, any_thread=True)
        self._sealing = SealUpdater(self._db)
        # Newest epoch when this writer started, and after its own last commit.
        self._epoch = newest_epoch(self._db)
        self._commits = CommitThread("journal", self._commit_batch)
        # Fails with the JournalError when the disk refuses.
        self.broken = self._commits.broken

    async def run_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction; return when it is durable.

        Raises what `work` raises, or JournalError if the disk refused. Cancelling the caller
        ends its wait, but the write still happens."""
        return await self._commits.run(work)

    def close(self) -> None:
        """Finish the queued writes, and end the thread."""
        self._commits.close()
        self._db.close()
        self._mark.close()

    def _commit_batch(self, batch: Batch) -> None:
        db, sealing = self._db, self._sealing
        try:
            db.execute("BEGIN IMMEDIATE")
            self._check_epoch(db)
            sealing.begin_transaction()
            done = run_each(batch, lambda work: _run_in_savepoint(db, sealing, work))
            epoch, position = newest_epoch(db), sealing.seal_transaction()
            db.execute("COMMIT")
            if position:
                self._mark.note_commit(position)
        except StaleEpochError:
            db.execute("ROLLBACK")
            raise
        except (sqlite3.Error, BrokenSealError) as error:
            raise JournalError(f"cannot write {self._path}: {error}") from error
        except OSError as error:
            raise JournalError(f"cannot write {self._mark.path}: {error}") from error
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
