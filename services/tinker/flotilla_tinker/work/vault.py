"""Saved weights: checkpoints, and the folders that samplers and recovery points use.

No part of a folder's name comes from a client: names of checkpoints are only in the journal."""

import asyncio
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from flotilla_common.telemetry.log import get_logger
from flotilla_tinker.store import record_rows
from flotilla_tinker.store.record_rows import CheckpointRow, WeightsRow
from flotilla_tinker.store.store import Store
from flotilla_tinker.work.desk_errors import NotFound
from flotilla_tinker.work.limits import Limits

SCHEME = "tinker://"
BASE_WEIGHTS = "base"
GONE = "the sampler's weights were deleted, or made room when nobody used them: save them again"
_log = get_logger(__name__)


def checkpoint_path(model_id: str, kind: str, name: str) -> str:
    return f"{SCHEME}{model_id}/{'weights' if kind == 'training' else 'sampler_weights'}/{name}"


def kind_of(path: str) -> str:
    """Return the kind of checkpoint that has this path."""
    return "training" if path.split("/")[-2] == "weights" else "sampler"


class Vault:
    """All saved weights; the journal is the truth, this is its copy in memory."""

    def __init__(self, store: Store, limits: Limits, clock: Callable[[], float]) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self.folder = store.folder / "weights"
        self.checkpoints: dict[str, CheckpointRow] = {}
        self.weights: dict[str, WeightsRow] = {}
        # When weights were last used, if that was since this process began.
        self._used_s: dict[str, float] = {}
        self._begun_s = clock()

    async def load(self, recovery_folders: Iterable[str | None]) -> None:
        """Read what is kept, and remove folders that a killed process left half written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for checkpoint in await self._store.run(record_rows.all_checkpoints):
            folder = self.place_of(checkpoint.folder)
            self.checkpoints[checkpoint.record.path] = replace(checkpoint, folder=folder)
        for row in await self._store.run(record_rows.all_weights):
            folder = row.folder and self.place_of(row.folder)
            self.weights[row.weights_id] = replace(row, folder=folder)
        named = (*self.checkpoints.values(), *self.weights.values())
        kept = {*(row.folder for row in named), *recovery_folders}
        left = [str(each) for each in self.folder.iterdir() if str(each) not in kept]
        await self.remove_folders(left)

    def place_of(self, folder: str) -> str:
        """Return where a saved folder is: with the journal, which may have been moved."""
        return str(self.folder / Path(folder).name)

    def new_folder(self) -> str:
        """Return the path of a folder that does not exist."""
        return str(self.folder / uuid.uuid4().hex)

    def find_checkpoint(self, tenant: str, path: str, kind: str | None = None) -> CheckpointRow:
        """Return a tenant's checkpoint. Raises NotFound."""
        found = self.checkpoints.get(path)
        if found is None or found.record.tenant != tenant or self._is_expired(found):
            raise NotFound(f"there is no checkpoint {path!r}; it may have expired or been deleted")
        if kind is not None and found.record.kind != kind:
            wanted = "save_state" if kind == "training" else "save_weights_for_sampler"
            raise NotFound(f"{path} is of kind {found.record.kind}: use a path that {wanted} gave")
        return found

    def used_bytes(self, tenant: str) -> int:
        """Return the disk use of a tenant's checkpoints and samplers."""
        sizes = {
            row.folder: row.record.size_bytes
            for row in self.checkpoints.values()
            if row.record.tenant == tenant
        }
        mine = (row for row in self.weights.values() if row.tenant == tenant)
        sizes.update({row.folder: row.size_bytes for row in mine if row.folder})
        return sum(sizes.values())

    def note_use(self, weights_id: str) -> None:
        self._used_s[weights_id] = self._clock()

    def unused_weights(self, tenant: str) -> list[str]:
        """Return the weights of sampling sessions that must make room for a tenant's next save:
        those that nobody has used for long, longest first."""
        too_many = self.used_bytes(tenant) - self._limits.most_disk_bytes + 1
        since = self._clock() - self._limits.unused_s
        mine = [row for row in self.weights.values() if row.tenant == tenant and row.session_id]
        used_s = {row: self._used_s.get(row.weights_id, self._begun_s) for row in mine}
        found = list[str]()
        for row in sorted((row for row in mine if used_s[row] < since), key=used_s.__getitem__):
            if too_many > 0:
                found.append(row.weights_id)
                too_many -= row.size_bytes
        return found

    async def delete_weights(self, weights_id: str) -> None:
        """Delete weights of a sampling session."""
        row = self.weights.pop(weights_id)
        self._used_s.pop(weights_id, None)
        await self._store.run(lambda db: record_rows.delete_weights(db, weights_id))
        await self.remove_folders((row.folder,))

    def problem_with_space(self, tenant: str) -> str | None:
        """Return why no more may be saved for a tenant; None if it may."""
        used, most = self.used_bytes(tenant), self._limits.most_disk_bytes
        if used >= most:
            return (
                f"checkpoints and samplers use {used} of {most} bytes: delete checkpoints, or give"
                " them a time to live"
            )
        return self.problem_with_disk()

    def problem_with_disk(self) -> str | None:
        """Return why nothing more may be written; None if it may."""
        free, least = shutil.disk_usage(self.folder).free, self._limits.free_disk_bytes
        if free >= least:
            return None
        return f"the server's disk has {free} bytes free, and keeps {least}: delete checkpoints"

    async def delete_checkpoint(self, row: CheckpointRow) -> None:
        path = row.record.path

        def delete(db: sqlite3.Connection) -> None:
            record_rows.delete_checkpoint(db, path)
            record_rows.delete_weights(db, path)

        await self._store.run(delete)
        self.checkpoints.pop(path, None)
        self.weights.pop(path, None)
        await self.remove_folders((row.folder, str(self.archive_of(row))))

    async def set_ttl(self, row: CheckpointRow, seconds: float | None) -> None:
        path = row.record.path
        expires_s = None if seconds is None else self._clock() + seconds
        await self._store.run(lambda db: record_rows.set_expiry(db, path, expires_s))
        # It may have been deleted meanwhile.
        if kept := self.checkpoints.get(path):
            record = replace(kept.record, expires_s=expires_s)
            self.checkpoints[path] = replace(kept, record=record)

    def expired(self) -> list[CheckpointRow]:
        return [row for row in self.checkpoints.values() if self._is_expired(row)]

    def archive_of(self, row: CheckpointRow) -> Path:
        return self._store.folder / "archives" / f"{Path(row.folder).name}.tar"

    async def make_archive(self, row: CheckpointRow) -> Path:
        """Return a tar file of a checkpoint's folder, made once."""
        path = self.archive_of(row)
        if not path.exists():
            most = self._limits.most_archive_bytes - row.record.size_bytes
            await asyncio.to_thread(_write_archive, Path(row.folder), path, most)
        return path

    async def remove_folders(self, paths: Iterable[str | None]) -> None:
        """Remove folders and files that nothing names any more."""
        await asyncio.to_thread(partial(_remove_all, [path for path in paths if path]))

    def _is_expired(self, row: CheckpointRow) -> bool:
        return row.record.expires_s is not None and row.record.expires_s <= self._clock()


def _write_archive(folder: Path, path: Path, most_others: int) -> None:
    """Write a tar file, after the oldest others beyond `most_others` bytes are removed."""
    path.parent.mkdir(exist_ok=True)
    others = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
    kept = 0
    for other in others:
        kept += other.stat().st_size
        if kept > most_others:
            other.unlink()
    draft = path.with_name(f"{path.stem}.{uuid.uuid4().hex}")
    made = shutil.make_archive(str(draft), "tar", root_dir=folder)
    Path(made).replace(path)


def _remove_all(paths: list[str]) -> None:
    for path in paths:
        try:
            shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot remove saved weights", path=path, error=str(error))
