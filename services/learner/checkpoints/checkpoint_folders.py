"""Checkpoints as folders under `runs/RUN_ID/checkpoints`.

A checkpoint is made in `step-000040.tmp-2` (step, run epoch): the ranks copy their state, and
write and fsync their files there beside training; then the manifest follows (see `manifest`). In
one transaction of the journal the folder is renamed to `step-000040`, the parent folder fsynced,
and the row added that makes it the newest. That row is the only pointer: a folder without one is a
leftover, removed at the next start, unless it is intact and of a step that the journal does not
know. The transaction is also the fence: a learner of an older run epoch can neither rename nor
commit. Steps that were planned since the copy was made are after the checkpoint: what they train on
is kept, and a start from it trains them again.

`Checkpoints.find_newest` reads every byte of a checkpoint before it is used. A damaged one is
reported as an incident, and the previous one is taken: the journal still has what is needed to
replay the steps between (payloads are kept until the oldest kept checkpoint contains them)."""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

from services.common.concurrency import cancel_tasks
from services.common.durable_files import sha256_of, sync_path
from services.learner.journal.row_codec import replayed_version
from services.learner.journal.schema import CheckpointRow
from services.learner.journal.store import Journal
from services.learner.ports import RankError, Ranks
from services.learner.run_files.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpointError,
    FileEntry,
    Manifest,
    verify_checkpoint,
    write_manifest,
)
from services.learner.run_files.progress_evidence import orphans_after
from services.learner.types import CheckpointFiles


class CheckpointWriteError(Exception):
    """A checkpoint could not be written; earlier ones are unchanged."""


class Checkpoints:
    """Writes and finds the checkpoints of one run, under its folder."""

    def __init__(
        self, run_dir: Path, journal: Journal, *, run_id: str, run_epoch: int, keep: int
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self._journal = journal
        self._run_id = run_id
        self._run_epoch = run_epoch
        self._keep = keep
        # The newest checkpoint, from the copy of the ranks' state on.
        self._saving: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        self._metrics: dict[str, float] = {}

    async def begin_save(self, ranks: Ranks, step: int) -> None:
        """Have the ranks copy their state, to become the checkpoint of `step` beside training.

        Waits for the checkpoint before. Raises CheckpointWriteError, as `finish_save`."""
        await self.finish_save()
        began, temporary = time.monotonic(), self.folder / f"step-{step:06d}.tmp-{self._run_epoch}"
        try:
            # What is there is of an attempt that failed.
            await asyncio.to_thread(_remove_folder, temporary)
            written = await ranks.begin_checkpoint(temporary)
        except (OSError, RankError) as error:
            raise await self._give_up(temporary, step, error) from error
        self._saving = asyncio.create_task(self._complete_save(written, temporary, step, began))
        self._saving.add_done_callback(self._note_end)

    async def finish_save(self) -> None:
        """Wait until the checkpoint that was begun is the newest, and old ones are removed.

        Raises CheckpointWriteError when the disk refuses: then nothing has changed, and nothing
        of the attempt remains."""
        if self._saving is not None:
            await asyncio.wait({self._saving})
            self._saving.result()

    async def wait_until_failed(self) -> None:
        """Wait until a checkpoint cannot be written; then raise CheckpointWriteError."""
        await self._failed.wait()
        await self.finish_save()

    async def close(self) -> None:
        """Give up what is not finished; the next start removes what remains of it."""
        if self._saving is not None:
            await cancel_tasks((self._saving,))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the checkpoints finished since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def find_newest(self) -> CheckpointRow | None:
        """Return the newest intact checkpoint; None when there is none.

        Newer ones that are damaged are forgotten once an intact one is found, so that they do
        not count among those that are kept. Raises ForeignCheckpointError."""
        await self._remove_leftovers()
        damaged: list[int] = []
        for found in await self._journal.list_checkpoints():
            row = replace(found, directory=str(self._local_folder(found.directory)))
            try:
                await asyncio.to_thread(_verify_row, row)
            except DamagedCheckpointError as error:
                damaged.append(row.step)
                text = f"a checkpoint is damaged, trying the one before: {error}"
                self._journal.incidents.report_incident("damaged_checkpoint", text, row.directory)
            else:
                await self._journal.forget_checkpoints(damaged)
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
        await self._take_note(row)

    async def _take_note(self, row: CheckpointRow) -> None:
        """Do what follows from a new checkpoint."""

    async def _give_up(self, temporary: Path, step: int, error: Exception) -> CheckpointWriteError:
        await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
        problem = f"the checkpoint of step {step} cannot be written to {self.folder}: {error}"
        final = self.folder / f"step-{step:06d}"
        self._journal.incidents.report_incident("checkpoint_failed", problem, str(final))
        return CheckpointWriteError(
            f"{problem}\nThe checkpoints before it are intact: resume the run when this is mended"
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

        An intact checkpoint of a step that the journal has never planned is no leftover: then
        it is the journal that is incomplete."""
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

    A folder that is already there was never committed, or is damaged: each step is saved once."""
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
