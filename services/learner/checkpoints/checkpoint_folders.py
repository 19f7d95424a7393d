"""Checkpoints as folders under `runs/RUN_ID/checkpoints`.

A checkpoint is made in `step-000040.tmp-2` (step, run epoch): the ranks write and fsync their
files there, then the manifest follows (see `manifest`). In one transaction of the journal the
folder is renamed to `step-000040`, the parent folder fsynced, and the row added that makes it
the newest. That row is the only pointer: a folder without one is a leftover, removed at the
next start, unless it is intact and of a step that the journal does not know. The transaction is
also the fence: a learner of an older run epoch can neither rename nor commit.

`Checkpoints.find_newest` reads every byte of a checkpoint before it is used. A damaged one is
reported as an incident, and the previous one is taken: the journal still has what is needed to
replay the steps between (payloads are kept until the oldest kept checkpoint contains them)."""

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

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

    async def save_step(self, ranks: Ranks, step: int) -> CheckpointRow:
        """Write the ranks' state as the checkpoint of `step`, make it the newest, remove old ones.

        Raises CheckpointWriteError when the disk refuses: then nothing has changed, and nothing
        of the attempt remains."""
        temporary = self.folder / f"step-{step:06d}.tmp-{self._run_epoch}"
        final = self.folder / f"step-{step:06d}"
        try:
            # What is there is of an attempt that failed.
            await asyncio.to_thread(_remove_folder, temporary)
            files = await ranks.save_checkpoint(temporary)
            row = await asyncio.to_thread(self._seal_folder, temporary, final, step, files)
            old = await self._journal.commit_checkpoint(
                row, self._keep, lambda: _put_in_place(temporary, final)
            )
        except (OSError, RankError) as error:
            await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
            problem = f"the checkpoint of step {step} cannot be written to {self.folder}: {error}"
            self._journal.incidents.report_incident("checkpoint_failed", problem, str(final))
            raise CheckpointWriteError(
                f"{problem}\nThe checkpoints before it are intact: resume the run when this is"
                " mended"
            ) from error
        for directory in old:
            await asyncio.to_thread(_remove_folder, self._local_folder(directory))
        return row

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

    A folder that is already there was never committed, or is damaged: `save_step` runs once per
    step."""
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
