"""A thread that does all writes to an SQLite file, so that no fsync ever blocks the event loop.

Writes that arrive during a commit share the next one: they pay the cost of an fsync once."""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

Work = Callable[[sqlite3.Connection], Any]
Batch = Sequence[tuple[Work, "Future[Any]"]]

# Most writes in one commit, so that the first does not wait for all others.
_MAX_BATCH = 256


class CommitThread:
    """Hands what callers run to `commit`, in order and in batches.

    `commit` runs in the thread and sets the results of its batch. What it raises fails the batch
    and all that comes later: after a failed fsync the content of the disk is unknown."""

    def __init__(self, name: str, commit: Callable[[Batch], None]) -> None:
        self._commit = commit
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        # Fails with what `commit` has raised.
        self.broken: Future[None] = Future()
        self.broken.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run_batches, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Have `work` committed; return its result when that is done.

        Raises what `work` or `commit` raises. Cancelling the caller ends its wait, but the write
        still happens."""
        if self._failure:
            raise self._failure
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._queue.put((work, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish what is queued, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run_batches(self) -> None:
        while batch := self._next_batch():
            if self._failure is None:
                try:
                    self._commit(batch)
                except Exception as error:  # noqa: BLE001 - it belongs to all callers
                    self._failure = error
                    self.broken.set_exception(error)
            if self._failure is not None:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(self._failure)

    def _next_batch(self) -> Batch:
        first = self._queue.get()
        batch = [] if first is None else [first]
        while batch and len(batch) < _MAX_BATCH and not self._queue.empty():
            item = self._queue.get()
            if item is None:
                self._queue.put(None)
                break
            batch.append(item)
        return batch


def run_each(batch: Batch, run: Callable[[Work], Any]) -> list[tuple["Future[Any]", Any]]:
    """Run the works of a batch in its transaction; return the results to set once it is on disk.
    What a work raises goes to its caller.

    Raises sqlite3.OperationalError: a full disk or an I/O error concerns the whole batch."""
    done: list[tuple[Future[Any], Any]] = []
    for work, future in batch:
        try:
            done.append((future, run(work)))
        except sqlite3.OperationalError:
            raise
        except Exception as error:  # noqa: BLE001 - it belongs to the caller of this work
            future.set_exception(error)
    return done
