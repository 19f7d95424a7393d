"""Checkpoints as folders under `runs/RUN_ID/checkpoints`.

A checkpoint is made in `step-000040.tmp-2` (step, run epoch): the ranks copy their state, and
write and fsync their files there beside training; then the manifest follows (see
`run_files/checkpoint_manifest.py`). In one transaction of the journal the folder is renamed to
`step-000040`, the parent folder fsynced, and the row added that makes it the newest. That row is
the only pointer: a folder without one is a leftover, removed at the next start, unless it is intact
and of a step that is missing from the journal. The transaction is also the fence: a learner of an
older run epoch can neither rename nor commit. Steps planned after the copy come after the
checkpoint: their data is kept, and a start from the checkpoint trains them again.

`Checkpoints.find_newest` reads every byte of a checkpoint before it is used. A damaged one is
reported as an incident, and the previous one is used: the journal still has everything needed to
replay the steps in between (payloads are kept until the oldest kept checkpoint contains them)."""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.files.durable_files import sha256_of, sync_path
from flotilla_learner.checkpoints.uploads import CheckpointUploads
from flotilla_learner.journal.run_progress import replayed_version
from flotilla_learner.journal.schema import CheckpointRow
from flotilla_learner.journal.store import Journal
from flotilla_learner.ports import RankError, Ranks
from flotilla_learner.run_files.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpointError,
    FileEntry,
    Manifest,
    verify_checkpoint,
    write_manifest,
)
from flotilla_learner.run_files.progress_evidence import orphans_after
from flotilla_learner.types import CheckpointFiles


class CheckpointWriteError(Exception):
    """A checkpoint could not be written; earlier ones are unchanged."""


class Checkpoints:
    """Writes and finds the checkpoints of one run, under its folder, and has them uploaded."""

    def __init__(
        self,
        run_dir: Path,
        journal: Journal,
        uploads: CheckpointUploads,
        *,
        run_id: str,
        run_epoch: int,
        keep: int,
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self._journal = journal
        self._uploads = uploads
        self._run_id = run_id
        self._run_epoch = run_epoch
        self._keep = keep
        # The newest checkpoint, from the copy of the ranks' state on.
        self._saving: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        self._metrics: dict[str, float] = {}

    async def begin_save(self, ranks: Ranks, step: int) -> None:
        """Have the ranks copy their state, which becomes the checkpoint of `step` beside training.

        Waits for the previous checkpoint. Raises CheckpointWriteError, like `finish_save`."""
        await self.finish_save()
        began, temporary = time.monotonic(), self.folder / f"step-{step:06d}.tmp-{self._run_epoch}"
        try:
            # The existing folder belongs to a failed attempt.
            await asyncio.to_thread(_remove_folder, temporary)
            written = await ranks.begin_checkpoint(temporary)
        except (OSError, RankError) as error:
            raise await self._give_up(temporary, step, error) from error
        self._saving = asyncio.create_task(self._complete_save(written, temporary, step, began))
        self._saving.add_done_callback(self._note_end)

    async def finish_save(self) -> None:
        """Wait until the current checkpoint is the newest, and old ones are removed.

        Raises CheckpointWriteError if the disk refuses: then nothing has changed, and nothing
        of the attempt remains."""
        if self._saving is not None:
            await asyncio.wait({self._saving})
            self._saving.result()

    async def wait_until_failed(self) -> None:
        """Wait until a checkpoint cannot be written; then raise CheckpointWriteError."""
        await self._failed.wait()
        await self.finish_save()

    async def close(self) -> None:
        """Abandon an unfinished checkpoint; the next start removes its remains."""
        if self._saving is not None:
            await cancel_tasks((self._saving,))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of checkpoints and uploads that ended since the last call."""
        metrics, self._metrics = self._metrics, {}
        return {**metrics, **self._uploads.metrics()}

    async def find_newest(self) -> CheckpointRow | None:
        """Return the newest intact checkpoint; None if there is none. It is queued again, since the
        end of the last start may have cut off its upload.

        Newer, damaged ones are forgotten once an intact one is found, so that they do not count
        as kept. Raises ForeignCheckpointError."""
        await self._remove_leftovers()
        damaged: list[int] = []
        for found in await self._journal.list_checkpoints():
            row = replace(found, directory=str(self._local_folder(found.directory)))
            try:
                await asyncio.to_thread(_verify_row, row)
            except DamagedCheckpointError as error:
                damaged.append(row.step)
                text = f"a checkpoint is damaged, trying the previous one: {error}"
                self._journal.incidents.report_incident("damaged_checkpoint", text, row.directory)
            else:
                await self._journal.forget_checkpoints(damaged)
                await self._uploads.offer(row)
                return row
        return None

    async def _complete_save(
        self, written: Awaitable[CheckpointFiles], temporary: Path, step: int, began: float
    ) -> None:
        final = self.folder / f"step-{step:06d}"
        try:
            files = await written
            row = await asyncio.to_thread(self._seal_folder, temporary, final, step, files)
            old = await self._journal.commit_checkpoint(
                row, self._keep, lambda: _put_in_place(temporary, final)
            )
        except (OSError, RankError) as error:
            raise await self._give_up(temporary, step, error) from error
        for directory in old:
            await asyncio.to_thread(_remove_folder, self._local_folder(directory))
        self._metrics["timing/checkpoint_write"] = time.monotonic() - began
        await self._uploads.offer(row)

    async def _give_up(self, temporary: Path, step: int, error: Exception) -> CheckpointWriteError:
        await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
        problem = f"the checkpoint of step {step} cannot be written to {self.folder}: {error}"
        final = self.folder / f"step-{step:06d}"
        self._journal.incidents.report_incident("checkpoint_failed", problem, str(final))
        return CheckpointWriteError(
            f"{problem}\nEarlier checkpoints are intact: fix this, then resume the run"
        )

    def _note_end(self, saving: asyncio.Task[None]) -> None:
        if not saving.cancelled() and saving.exception() is not None:
            self._failed.set()

    def _seal_folder(
        self, temporary: Path, final: Path, step: int, files: CheckpointFiles
    ) -> CheckpointRow:
        entries = {
            name: FileEntry(digest, (temporary / name).stat().st_size)
            for name, digest in files.sha256.items()
        }
        manifest = Manifest(self._run_id, self._run_epoch, step, entries)
        digest = write_manifest(temporary, manifest)
        sync_path(temporary)
        return CheckpointRow(step, str(final), {**files.sha256, MANIFEST: digest})

    async def _remove_leftovers(self) -> None:
        """Remove folders left by starts that were killed while they made or removed a checkpoint.

        An intact checkpoint of a step that the journal has never planned is not a leftover: then
        the journal is incomplete."""
        known = {Path(row.directory).name for row in await self._journal.list_checkpoints()}
        planned = await self._journal.run_read(replayed_version)

        def remove_unknown() -> None:
            kept = {orphan.folder.name for orphan in orphans_after(self.folder.parent, planned)}
            for path in self.folder.glob("step-*"):
                if path.name not in known | kept:
                    _remove_folder(path)

        await self._journal.run_fenced(remove_unknown)

    def _local_folder(self, directory: str) -> Path:
        """Return a checkpoint's folder; the run's folder may have been moved or copied."""
        return self.folder / Path(directory).name


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name.

    An existing folder was never committed, or is damaged: each step is saved once."""
    _remove_folder(final)
    os.rename(temporary, final)
    sync_path(final.parent)


def _remove_folder(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _verify_row(row: CheckpointRow) -> None:
    """Verify that the manifest matches the row, and the files match the manifest."""
    directory = Path(row.directory)
    path = directory / MANIFEST
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    if digest != row.files.get(MANIFEST):
        raise DamagedCheckpointError(f"{path} has changed")
    verify_checkpoint(directory)
