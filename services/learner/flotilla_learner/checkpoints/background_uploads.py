"""Upload of checkpoints beside training: a thread, and a queue of one in which the newest wins."""

import asyncio
import sqlite3
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

from flotilla_common.run_folder.journal_file import connect_journal
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.checkpoints import remote_staging
from flotilla_learner.checkpoints.remote_layout import Progress, Stamp
from flotilla_learner.checkpoints.remote_staging import Staged
from flotilla_learner.checkpoints.remote_target import RemoteTarget
from flotilla_learner.checkpoints.remote_upload import (
    FencedError,
    Identity,
    LocalDamageError,
    Uploader,
)
from flotilla_learner.checkpoints.uploads import CheckpointUploads
from flotilla_learner.journal.run_progress import acknowledged_tries, planned_step
from flotilla_learner.journal.schema import CheckpointRow
from flotilla_learner.ports import RemoteStoreError, RemoteStoreRefusedError

# Pause between retries of an upload, and between checks for a takeover.
RETRY_S = 15.0
BEAT_S = 20.0
_HURRIED_S = 1.0
_POLL_S = 0.05
_log = get_logger(__name__)


class UploadError(Exception):
    """The last checkpoint is not in the store; the message gives the reason."""


class BackgroundUploads(CheckpointUploads):
    """One learner's uploads, from background threads, once it owns the epoch (`remote_claim`)."""

    def __init__(self, place: RemoteTarget, journal: Path, who: Identity) -> None:
        self._place = place
        self._journal = journal
        self._who = who
        self._ending = threading.Event()
        self._change = threading.Condition()
        self._pending: Staged | None = None
        self._busy = False
        self._staging = 0
        self._hurried = False
        self._failure: Exception | None = None
        self._metrics: dict[str, float] = {}
        self._uploader = Uploader(
            place.store, who, place.run_dir, keep=place.keep, wait=self._ending.wait
        )
        # Fails with the FencedError when another learner takes over the run.
        self._fenced: Future[None] = Future()
        self._fenced.set_running_or_notify_cancel()
        for work, name in ((self._upload_all, "uploads"), (self._beat, "uploads-beat")):
            # Daemons: a store that hangs must not keep the process from ending.
            threading.Thread(target=work, name=name, daemon=True).start()

    async def offer(self, row: CheckpointRow) -> None:
        held: Future[None] = Future()
        with self._change:
            self._staging += 1
        threading.Thread(target=self._stage, args=(row, held), daemon=True).start()
        await asyncio.wrap_future(held)

    async def wait_until_fenced(self) -> None:
        await asyncio.wrap_future(self._fenced)

    async def finish(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        await asyncio.to_thread(self._note_progress)
        if not self._idle():
            _log.info("waiting for the last upload", at_most_s=timeout_s)
            self._hurry()
        while not self._idle() and not isinstance(self._failure, RemoteStoreRefusedError):
            if time.monotonic() > deadline:
                self._failure = self._failure or UploadError(f"it takes more than {timeout_s:g} s")
                break
            await asyncio.sleep(_POLL_S)
        if self._fenced.done():
            self._fenced.result()
        if self._failure is not None:
            raise UploadError(
                f"the last checkpoint is not at {self._place.store.url}: {self._failure}. It is"
                f" still in {self._place.run_dir}; resume the run to upload it"
            ) from self._failure

    def _hurry(self) -> None:
        """Retry a failed upload now."""
        with self._change:
            self._hurried = True
            if self._pending or self._busy:
                self._failure = None
            self._change.notify_all()

    def metrics(self) -> dict[str, float]:
        with self._change:
            metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        self._ending.set()
        with self._change:
            self._change.notify_all()

    # --- threads

    def _stage(self, row: CheckpointRow, held: Future[None]) -> None:
        place, stamp = self._place, Stamp(self._who.run_epoch, row.step)
        source = remote_staging.Source(row, place.run_dir, self._journal, place.spec)
        try:
            self._enqueue(remote_staging.stage(source, stamp, lambda: held.set_result(None)))
        except (OSError, sqlite3.Error) as error:
            # Training continues: the checkpoint itself is safe in its folder.
            self._failed(error, row.step)
        finally:
            with self._change:
                self._staging -= 1
            if not held.done():
                held.set_result(None)

    def _enqueue(self, staged: Staged) -> None:
        with self._change:
            older, self._pending = self._pending, staged
            if older is not None and older.stamp > staged.stamp:
                older, self._pending = staged, older
            self._change.notify_all()
        if older is not None:
            older.discard()

    def _upload_all(self) -> None:
        while (staged := self._next()) is not None:
            try:
                self._upload(staged)
            except FencedError as error:
                self._fence(error)
                return
            finally:
                with self._change:
                    self._busy = False

    def _fence(self, error: FencedError) -> None:
        """Record the takeover for both threads."""
        with self._change:
            if not self._fenced.done():
                self._fenced.set_exception(error)

    def _next(self) -> Staged | None:
        """Wait for a checkpoint; return None if the learner stops."""
        with self._change:
            self._change.wait_for(lambda: self._pending or self._ending.is_set())
            if self._ending.is_set():
                return None
            staged, self._pending, self._busy = self._pending, None, True
            return staged

    def _upload(self, staged: Staged) -> None:
        step, began = staged.stamp.step, time.monotonic()
        try:
            sent = self._uploader.upload(staged)
        except LocalDamageError as error:
            self._failed(error, step)
            staged.discard()
            return
        except (RemoteStoreError, OSError) as error:
            self._failed(error, step)
            self._again(staged)
            return
        staged.discard()
        seconds = time.monotonic() - began
        with self._change:
            self._failure = None
            self._metrics |= {"timing/upload": seconds, "checkpoint/uploaded_bytes": float(sent)}
        if sent:
            _log.info("uploaded", step=step, bytes=sent, seconds=round(seconds, 1))

    def _failed(self, error: Exception, step: int) -> None:
        if self._ending.is_set():
            return
        _log.error("a checkpoint could not be uploaded", step=step, why=str(error))
        with self._change:
            self._failure = error
            failures = self._metrics.get("checkpoint/upload_failures", 0.0)
            self._metrics["checkpoint/upload_failures"] = failures + 1

    def _again(self, staged: Staged) -> None:
        """Keep the checkpoint for a retry, unless a newer one has arrived."""
        with self._change:
            if self._pending is None:
                self._pending = staged
                pause_s = _HURRIED_S if self._hurried else RETRY_S
                self._change.wait_for(lambda: self._pending is not staged, pause_s)
                return
        staged.discard()

    def _idle(self) -> bool:
        with self._change:
            return self._fenced.done() or not (self._pending or self._busy or self._staging)

    def _beat(self) -> None:
        """Record the run's progress in the store, and check for a takeover."""
        while not self._fenced.done():
            self._note_progress()
            if self._ending.wait(BEAT_S):
                return

    def _note_progress(self) -> None:
        try:
            self._uploader.check_fence()
            with closing(connect_journal(self._journal, read_only=True)) as db:
                reached = acknowledged_tries(db), planned_step(db)
            now = Progress(self._who.run_epoch, *reached)
            self._place.store.write(now.name, now.encode())
        except FencedError as error:
            self._fence(error)
        except (RemoteStoreError, sqlite3.Error) as error:
            if not self._ending.is_set():
                _log.warning("cannot record the run's progress in the store", why=str(error))
