"""Restoration of a run from the store to a folder on this machine, atomically. Blocks.

Whatever the run's disk held beyond its newest remote checkpoint is lost, and counted."""

import fcntl
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from flotilla_common.files.durable_files import sha256_of, sync_path
from flotilla_common.process.own_version import own_version
from flotilla_common.run_folder.journal_file import READ_VERSIONS, SCHEMA_VERSION
from flotilla_common.run_folder.metric_lines import METRICS_FILE
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.checkpoints.remote_layout import (
    JOURNAL,
    MANIFESTS,
    PROGRESS,
    RANK_FOLDER,
    SPEC,
    LayoutError,
    Marker,
    RemoteFile,
    RemoteManifest,
    Stamp,
    decode_manifest,
    decode_progress,
    stamps,
    surviving,
)
from flotilla_learner.checkpoints.remote_repair import (
    Restored,
    cut_metrics,
    mend_journal,
    read_steps,
)
from flotilla_learner.checkpoints.remote_upload import read_markers, retry_request, sleep
from flotilla_learner.checkpoints.tensor_files import TensorFileError, check_dtype
from flotilla_learner.ports import RemoteStore, RemoteStoreRefusedError

T = TypeVar("T")

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_log = get_logger(__name__)


class RestoreError(Exception):
    """The run cannot be resumed from the store; the message gives the reason, and nothing was
    changed here."""


class NothingThereError(RestoreError):
    """No learner has ever claimed this place."""


class _DamagedError(Exception):
    """A checkpoint differs from its manifest; an older one may be intact."""


@dataclass(frozen=True, slots=True)
class _Found:
    stamps: Sequence[Stamp]
    markers: Sequence[Marker]
    # Tries acknowledged and steps planned, as far as any learner recorded them.
    acknowledged: int
    step: int


def restore(store: RemoteStore, runs: Path, *, name: str, for_reading: bool = False) -> Restored:
    """Restore the newest intact checkpoint of a run of spec `name` under `runs`; `for_reading`,
    without the ranks' files, so that it cannot be resumed.

    A damaged or missing one is logged, and the newest untried one is used. Raises
    RestoreError; RemoteStoreError if the store is unreachable."""
    found, problems = _look(store), dict[Stamp, str]()
    while left := [stamp for stamp in found.stamps if stamp not in problems]:
        try:
            manifest = _manifest(store, left[-1])
            if for_reading:
                manifest = _without_ranks(manifest)
            return _restore(store, manifest, found, runs, name)
        except _DamagedError as error:
            problems[left[-1]] = str(error)
            _log.error("a remote checkpoint is damaged, trying another", why=str(error))
        # A learner that still runs elsewhere removes old ones as it uploads newer ones.
        found = _look(store)
    details = [f"{stamp}: {why}" for stamp, why in problems.items()]
    raise RestoreError(
        f"{store.url} has no intact checkpoint:\n  " + "\n  ".join(details or ["none left"])
    )


def _look(store: RemoteStore) -> _Found:
    """Read what the store holds. Raises RestoreError if there is no manifest."""
    found = stamps(_request(store, lambda: store.list_files(MANIFESTS)))
    markers = _request(store, lambda: read_markers(store))
    if not found:
        raise _nothing(store, bool(markers))
    noted = [
        decode_progress(_request(store, lambda n=name: store.read(n)) or b"")
        for name in _request(store, lambda: store.list_files(PROGRESS))
    ]
    known = [progress for progress in noted if progress is not None]
    return _Found(
        surviving(found, markers),
        markers,
        acknowledged=max((progress.acknowledged for progress in known), default=0),
        step=max((progress.step for progress in known), default=0),
    )


def _nothing(store: RemoteStore, begun: bool) -> RestoreError:
    if begun:
        return RestoreError(
            f"{store.url}: the run ended before its first checkpoint was uploaded: start a new run"
        )
    below = _request(store, lambda: store.list_files(""))
    runs = sorted({n.split("/")[0] for n in below if f"/{MANIFESTS}/" in n})
    if runs:
        more = f" (there are {', '.join(runs)})" if len(runs) > 1 else ""
        return RestoreError(
            f"{store.url} holds runs, not one: name it, as in {store.url}/{runs[-1]}{more}"
        )
    return NothingThereError(f"{store.url}: no run has a checkpoint there (no {MANIFESTS}/*.json)")


def _manifest(store: RemoteStore, stamp: Stamp) -> RemoteManifest:
    data = _request(store, lambda: store.read(stamp.manifest))
    if data is None:
        raise _DamagedError("its manifest is gone")
    try:
        return decode_manifest(data, stamp)
    except LayoutError as error:
        raise _DamagedError(f"its manifest cannot be read: {error}") from error


def _without_ranks(manifest: RemoteManifest) -> RemoteManifest:
    ranks = f"{RANK_FOLDER}/"
    kept = {name: file for name, file in manifest.files.items() if not name.startswith(ranks)}
    return replace(manifest, files=kept)


def _restore(
    store: RemoteStore, manifest: RemoteManifest, found: _Found, runs: Path, name: str
) -> Restored:
    _check_manifest(manifest, store.url)
    run_dir = runs / manifest.run_id
    _refuse_existing(run_dir)
    with _own_folder(runs / f".{manifest.run_id}.restoring") as folder:
        (folder / RANK_FOLDER).mkdir()
        for file_name, file in manifest.files.items():
            source = f"{manifest.stamp.folder}/{file_name}"
            _download(store, source, folder / file_name, file)
        _check_spec(folder / SPEC, store.url, name)
        _check_tensors(folder / RANK_FOLDER)
        restored = _mend(folder, store.url, manifest, found, run_dir)
        _settle(folder)
        _refuse_existing(run_dir)
        folder.rename(run_dir)
    sync_path(runs)
    return restored


def _check_manifest(manifest: RemoteManifest, url: str) -> None:
    if not _RUN_ID.fullmatch(manifest.run_id):
        raise RestoreError(f"{url}: {manifest.run_id!r} is not a run id")
    if manifest.schema_version not in READ_VERSIONS:
        raise RestoreError(
            f"{url}: its journal has format {manifest.schema_version}, but {own_version()} reads"
            f" format {SCHEMA_VERSION}: resume it with the flotilla that wrote it"
        )


def _refuse_existing(run_dir: Path) -> None:
    if run_dir.is_symlink() or (run_dir.exists() and any(run_dir.iterdir())):
        raise RestoreError(
            f"{run_dir} already exists, and may be ahead of the store: resume it with"
            f" `--resume {run_dir.name}`, or move it away"
        )


def _download(store: RemoteStore, source: str, target: Path, file: RemoteFile) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    size = _request(store, lambda: store.size(source))
    if size != file.size_bytes:
        there = "is missing" if size is None else f"has {size} bytes, not {file.size_bytes}"
        raise _DamagedError(f"{source} {there}")
    if not _request(store, lambda: store.download(source, target)):
        raise _DamagedError(f"{source} was removed")
    if sha256_of(target) != file.sha256:
        raise _DamagedError(f"{source} differs from what was uploaded")
    sync_path(target)


def _check_tensors(folder: Path) -> None:
    """Check the tensor files before they are mapped: master weights and moments are float32."""
    try:
        for path in sorted(folder.rglob("*.safetensors")):
            check_dtype(path, "F32")
    except TensorFileError as error:
        raise _DamagedError(str(error)) from error


def _check_spec(path: Path, url: str, name: str) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"its {path.name} cannot be read: {error!r}") from error
    if found != name:
        raise RestoreError(f"{url} is a run of spec {found!r}, not of {name!r}")


def _mend(
    folder: Path, url: str, manifest: RemoteManifest, found: _Found, run_dir: Path
) -> Restored:
    """Convert the files to the form that a learner on this machine expects."""
    stamp = manifest.stamp
    try:
        steps = read_steps(folder / JOURNAL)
    except (sqlite3.Error, ValueError) as error:
        raise _DamagedError(f"its journal cannot be read: {error}") from error
    restored = Restored(
        url=url,
        run_id=manifest.run_id,
        run_dir=str(run_dir),
        run_epoch=stamp.run_epoch,
        step=stamp.step,
        lost=max(0, found.acknowledged - manifest.acknowledged),
        lost_steps=max(0, found.step - max(stamp.step, steps.planned)),
        newest_epoch=max([stamp.run_epoch, *(marker.run_epoch for marker in found.markers)]),
    )
    markers = [marker.name for marker in found.markers]
    try:
        name = mend_journal(folder / JOURNAL, restored, markers)
        cut_metrics(folder / METRICS_FILE, max(stamp.step, steps.logged))
    except (sqlite3.Error, ValueError) as error:
        raise _DamagedError(f"its journal or metrics cannot be read: {error}") from error
    if name is None:
        raise _DamagedError(f"its journal does not know step {stamp.step}")
    (folder / "checkpoints").mkdir()
    (folder / RANK_FOLDER).rename(folder / "checkpoints" / name)
    return restored


@contextmanager
def _own_folder(folder: Path) -> Generator[Path]:
    """Create an empty folder, locked against other processes; removed on exit unless renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RestoreError(f"{folder}: another process is restoring this run there") from None
    try:
        _empty(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _settle(folder: Path) -> None:
    """Fsync everything, before the folder gets its final name."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def _request(store: RemoteStore, request: Callable[[], T]) -> T:
    """Call the store with retries. Raises RestoreError if it refuses, RemoteStoreError if it is
    unreachable."""
    try:
        return retry_request(request, sleep, attempts=4)
    except RemoteStoreRefusedError as error:
        raise RestoreError(f"cannot resume from {store.url}: {error}") from error
