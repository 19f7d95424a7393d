"""Checkpoints as folders under `runs/RUN_ID/checkpoints`.

A checkpoint is made in `step-000040.tmp-2` (step, run epoch): the ranks write and fsync their
files there, then comes the manifest (see `manifest`). In one transaction of the journal the folder
is renamed to `step-000040`, the parent folder fsynced, and the row added that makes it the newest:
that row is the only pointer, and a folder without one is a leftover, removed at the next start,
unless it is whole and of a step that the journal does not know.
The transaction is also the fence: a learner of an older run epoch can neither rename nor commit.

`Checkpoints.newest` reads every byte of a checkpoint before it is used. One that is damaged is
an incident, and the one before it is taken: the journal still has what is needed to replay the
steps between (payloads are kept until the oldest kept checkpoint contains them).
"""

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

from services.learner.checkpoints.durable_files import sha256_of, sync_path
from services.learner.checkpoints.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    FileEntry,
    Manifest,
    verify,
    write_manifest,
)
from services.learner.journal.progress_evidence import orphans_after
from services.learner.journal.row_codec import replayed_version
from services.learner.journal.schema import CheckpointRow
from services.learner.journal.store import Journal
from services.learner.ports import RankError, Ranks
from services.learner.types import CheckpointFiles


class CheckpointWriteError(Exception):
    """A checkpoint could not be written; those before it are as they were."""


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

    async def save(self, ranks: Ranks, step: int) -> CheckpointRow:
        """Write the ranks' state as that of `step`, make it the newest, remove old ones.

        Raises CheckpointWriteError when the disk refuses: nothing has changed then, and nothing
        is left of the attempt.
        """
        temporary = self.folder / f"step-{step:06d}.tmp-{self._run_epoch}"
        final = self.folder / f"step-{step:06d}"
        try:
            # What is there is of an attempt that failed.
            await asyncio.to_thread(_remove, temporary)
            files = await ranks.save(temporary)
            row = await asyncio.to_thread(self._seal, temporary, final, step, files)
            old = await self._journal.commit_checkpoint(
                row, self._keep, lambda: _put_in_place(temporary, final)
            )
        except (OSError, RankError) as error:
            await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
            problem = f"the checkpoint of step {step} cannot be written to {self.folder}: {error}"
            self._journal.incidents.report("checkpoint_failed", problem, str(final))
            raise CheckpointWriteError(
                f"{problem}\nThe checkpoints before it are intact: resume the run when this is"
                " mended"
            ) from error
        for directory in old:
            await asyncio.to_thread(_remove, self._here(directory))
        return row

    async def newest(self) -> CheckpointRow | None:
        """The newest checkpoint that is what was written; None when there is none.

        Damaged ones that are newer are forgotten once a whole one is found, lest they count
        among those that are kept. Raises ForeignCheckpointError.
        """
        await self._remove_leftovers()
        damaged: list[int] = []
        for found in await self._journal.checkpoints():
            row = replace(found, directory=str(self._here(found.directory)))
            try:
                await asyncio.to_thread(_check, row)
            except DamagedCheckpointError as error:
                damaged.append(row.step)
                text = f"a checkpoint is damaged, trying the one before: {error}"
                self._journal.incidents.report("damaged_checkpoint", text, row.directory)
            else:
                await self._journal.forget_checkpoints(damaged)
                return row
        return None

    def _seal(
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
        """Remove what starts left that were killed while they made a checkpoint, or removed one.

        A whole one of a step that the journal has never planned is no leftover: it is the journal
        that lacks something.
        """
        known = {Path(row.directory).name for row in await self._journal.checkpoints()}
        planned = await self._journal.read(replayed_version)

        def work() -> None:
            kept = {orphan.folder.name for orphan in orphans_after(self.folder.parent, planned)}
            for path in self.folder.glob("step-*"):
                if path.name not in known | kept:
                    _remove(path)

        await self._journal.fenced(work)

    def _here(self, directory: str) -> Path:
        """A checkpoint's folder; a run's folder may have been moved or copied."""
        return self.folder / Path(directory).name


def _put_in_place(temporary: Path, final: Path) -> None:
    """What is at `final` was never committed, or is damaged: `save` is asked for no step twice."""
    _remove(final)
    os.rename(temporary, final)
    sync_path(final.parent)


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _check(row: CheckpointRow) -> None:
    """The manifest is that of the row, and the files are those of the manifest."""
    directory = Path(row.directory)
    path = directory / MANIFEST
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    if digest != row.files.get(MANIFEST):
        raise DamagedCheckpointError(f"{path} has changed")
    verify(directory)
