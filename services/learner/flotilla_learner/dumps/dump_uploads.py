"""Uploads of dumps beside their writing, so that a slow store delays no file.

A file goes under `dumps/` in the run's folder in the store, with its name relative to the local run
folder. A failed upload is reported, and the file stays."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from flotilla_learner.checkpoints.remote_upload import retry_request
from flotilla_learner.dumps.jobs import DumpReport
from flotilla_learner.ports import RemoteStore, RemoteStoreError

FOLDER = "dumps"
# Most files that may wait; a step makes two.
_MOST_WAITING = 64
# Tries per file; only one while the store accepts none.
_TRIES = 3


class DumpUploads:
    """Uploads files one at a time, in a thread."""

    def __init__(
        self, store: RemoteStore, run_dir: Path, report: Callable[[DumpReport], None]
    ) -> None:
        """Create it; `report` is called from any thread with files that could not be uploaded."""
        self._store = store
        self._run_dir = run_dir
        self._report = report
        self._queue: queue.Queue[Path | None] = queue.Queue(_MOST_WAITING)
        # File that is being uploaded.
        self._current: Path | None = None
        self._ending = threading.Event()
        self._tries = _TRIES
        self._thread = threading.Thread(target=self._upload_queued, name="uploads", daemon=True)
        self._thread.start()

    def offer(self, path: Path) -> None:
        """Queue a file; if too many wait, it is not uploaded."""
        try:
            self._queue.put_nowait(path)
        except queue.Full:
            self._lose(path, "the store is slower than the run")

    def close(self, timeout_s: float) -> None:
        """Upload the waiting files, for a bounded time; the rest is reported."""
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._ending.set()
        why = f"the run ended, and the store took more than {timeout_s:g} s"
        for path in (*self._take_waiting(), self._current):
            if path is not None:
                self._lose(path, why)

    def _take_waiting(self) -> Iterator[Path | None]:
        with suppress(queue.Empty):
            while True:
                yield self._queue.get_nowait()

    def _upload_queued(self) -> None:
        while (path := self._queue.get()) is not None:
            self._current = path
            self._upload(path)
            self._current = None

    def _upload(self, path: Path) -> None:
        name = f"{FOLDER}/{self._name_of(path)}"
        try:
            retry_request(
                lambda: self._store.upload(path, name, lambda count: None),
                self._ending.wait,
                self._tries,
            )
        except RemoteStoreError as error:
            self._tries = 1
            # A file that was pruned in the meantime is not a loss.
            if path.exists():
                self._lose(path, str(error))
        else:
            self._tries = _TRIES

    def _lose(self, path: Path, why: str) -> None:
        self._report(DumpReport("", 0, {f"{FOLDER}/{self._name_of(path)}": why}))

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self._run_dir).as_posix()
