"""Checkpoints as folders with a manifest; the journal's row is the only pointer to the newest."""

import asyncio
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from services.common.log import get_logger
from services.learner.journal.schema import CheckpointRow
from services.learner.journal.store import Journal
from services.learner.ports import Ranks
from services.learner.types import CheckpointFiles

MANIFEST = "manifest.json"
_log = get_logger(__name__)


class Checkpoints:
    """Writes and finds the checkpoints of one run, under its folder."""

    def __init__(self, run_dir: Path, journal: Journal, *, keep: int) -> None:
        self._folder = run_dir / "checkpoints"
        self._journal = journal
        self._keep = keep

    async def save(self, ranks: Ranks, step: int) -> None:
        """Write the ranks' state as that of `step`, make it the newest, remove old ones."""
        directory = self._folder / f"step-{step:06d}"
        # What is there is of a start that did not live to commit it.
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        files = await ranks.save(directory)
        await asyncio.to_thread(_write_manifest, directory, step, files)
        old = await self._journal.commit_checkpoint(step, files, self._keep)
        for folder in old:
            await asyncio.to_thread(shutil.rmtree, self._here(folder), ignore_errors=True)

    async def newest(self) -> CheckpointRow | None:
        """The newest checkpoint whose files are what was written; None before the first.

        Damaged ones that are newer are forgotten, lest they count among those that are kept.
        """
        damaged: list[int] = []
        for found in await self._journal.checkpoints():
            row = replace(found, directory=str(self._here(found.directory)))
            problem = await asyncio.to_thread(_problem, row)
            if problem is None:
                await self._journal.forget_checkpoints(damaged)
                return row
            damaged.append(row.step)
            _log.error("a checkpoint is damaged, trying the one before", step=row.step, why=problem)
        return None

    def _here(self, directory: str) -> Path:
        """A checkpoint's folder; a run's folder may have been moved or copied."""
        return self._folder / Path(directory).name


def _write_manifest(directory: Path, step: int, files: CheckpointFiles) -> None:
    path = directory / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump({"step": step, "sha256": dict(files.sha256)}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    for folder in (directory, directory.parent):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _problem(row: CheckpointRow) -> str | None:
    for name, expected in row.files.items():
        path = Path(row.directory) / name
        if not path.is_file():
            return f"{path} is missing"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                return f"{path} has changed"
    return None
