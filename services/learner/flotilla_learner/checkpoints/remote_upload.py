"""Upload of one checkpoint, and the cleanup after it. Blocks: runs in a thread.

Files go first, each verified after its upload, and the manifest last. A learner whose run was
taken over writes no manifest."""

import hashlib
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flotilla_common.files.durable_files import sha256_of
from flotilla_common.run_folder.metric_lines import METRICS_FILE
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.checkpoints.remote_layout import (
    CHECKPOINTS,
    EPOCHS,
    MANIFESTS,
    LayoutError,
    Marker,
    RemoteFile,
    RemoteManifest,
    Stamp,
    decode_manifest,
    decode_marker,
    marker_of,
    stamps,
    surviving,
)
from flotilla_learner.checkpoints.remote_staging import Staged
from flotilla_learner.checkpoints.upload_report import UploadReport
from flotilla_learner.ports import RemoteStore, RemoteStoreError, RemoteStoreRefusedError

T = TypeVar("T")

# Files up to this size are read back and hashed after their upload; of larger ones only the size is
# compared, in addition to the checksums that the store itself verifies.
READ_BACK_BYTES = 8 << 20
_ATTEMPTS = 6
# Files of one checkpoint; the store also sends several parts of a large file at once.
_FILES_AT_ONCE = 4
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_log = get_logger(__name__)


class FencedError(Exception):
    """A later epoch has taken over the run: nothing of this learner counts any more."""


class LocalDamageError(Exception):
    """A file of the checkpoint differs from what was committed: it must not replace an older
    one."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of the uploading learner."""

    run_id: str
    run_epoch: int
    incarnation: str


def retry_request(
    request: Callable[[], T], wait: Callable[[float], bool], attempts: int = _ATTEMPTS
) -> T:
    """Retry a request to a store, with growing pauses of random length, until it succeeds.

    `wait` returns True if there is no time left. Raises RemoteStoreRefusedError at once, other
    RemoteStoreErrors after the last attempt."""
    for attempt in range(attempts):
        try:
            return request()
        except RemoteStoreRefusedError:
            raise
        except RemoteStoreError as error:
            pause = random.uniform(0.5, 1.0) * min(_LONGEST_PAUSE_S, _PAUSE_S * 2**attempt)
            if attempt + 1 == attempts or wait(pause):
                raise
            _log.warning("retrying a request to a store", error=str(error), seconds=round(pause, 1))
    raise AssertionError("attempts must be positive")


def sleep(seconds: float) -> bool:
    """Sleep for `retry_request`, for callers that never end the wait early."""
    time.sleep(seconds)
    return False


def read_markers(store: RemoteStore) -> list[Marker]:
    """Read the markers of all epochs of a run."""
    names = [name for name in store.list_files(EPOCHS) if marker_of(name)]
    return [decode_marker(store.read(name) or b"", name) for name in names]


@dataclass(frozen=True, slots=True)
class Uploader:
    """Uploads checkpoints of one learner, one at a time."""

    store: RemoteStore
    who: Identity
    run_dir: Path
    keep: int
    # Sleeps for seconds; returns True if the learner stops.
    wait: Callable[[float], bool]

    def upload(self, staged: Staged) -> int:
        """Upload a checkpoint; return the bytes sent, 0 if it was already there.

        Raises FencedError, LocalDamageError, RemoteError."""
        self.check_fence()
        if self._is_there(staged):
            return 0
        metrics = self.run_dir / METRICS_FILE
        if metrics.exists():
            shutil.copyfile(metrics, staged.folder / METRICS_FILE)
        files = {name: _digest(staged, name) for name in self._names(staged)}
        report = UploadReport(staged.stamp.step, sum(file.size_bytes for file in files.values()))
        self._send_all(staged, files, report)
        self.check_fence()
        manifest = RemoteManifest(
            staged.stamp, self.who.run_id, staged.schema_version, staged.acknowledged, files
        )
        self._request(lambda: self.store.write(staged.stamp.manifest, manifest.encode()))
        self._tidy(staged.stamp)
        return report.total_bytes

    def check_fence(self) -> None:
        """Raise FencedError if a later epoch has begun."""
        names = self._request(
            lambda: [*self.store.list_files(EPOCHS), *self.store.list_files(MANIFESTS)]
        )
        epochs = [found[0] for name in names if (found := marker_of(name))]
        epochs += [stamp.run_epoch for stamp in stamps(names)]
        newest = max(epochs, default=0)
        if newest > self.who.run_epoch:
            raise FencedError(
                f"run {self.who.run_id} continued elsewhere: {self.store.url} is at epoch"
                f" {newest}, this learner at {self.who.run_epoch}: end it, its work is discarded"
            )

    def _names(self, staged: Staged) -> Sequence[str]:
        metrics = [METRICS_FILE] if (staged.folder / METRICS_FILE).exists() else []
        return sorted([*staged.files, *metrics])

    def _is_there(self, staged: Staged) -> bool:
        """Return True if an earlier start finished an upload of the same files, or of a later
        step."""
        for stamp in self._surviving():
            if stamp.step > staged.stamp.step:
                return True
            if stamp.step == staged.stamp.step and self._holds(stamp, staged):
                return True
        return False

    def _holds(self, stamp: Stamp, staged: Staged) -> bool:
        data = self._request(lambda: self.store.read(stamp.manifest))
        try:
            files = decode_manifest(data or b"", stamp).files
        except LayoutError:
            return False
        sha256 = {name: file.sha256 for name, file in files.items()}
        return all(sha256.get(name) == own for name, own in staged.files.items() if own)

    def _send_all(
        self, staged: Staged, files: Mapping[str, RemoteFile], report: UploadReport
    ) -> None:
        """Send files, some at once; each rank wrote its own. Raises the first one's error."""
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="uploads-file") as pool:
            sent = [
                pool.submit(self._send, staged, name, file, report) for name, file in files.items()
            ]
            try:
                for each in sent:
                    each.result()
            finally:
                # Cancel files that have not started.
                pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, staged: Staged, name: str, file: RemoteFile, report: UploadReport) -> None:
        target = f"{staged.stamp.folder}/{name}"

        def send() -> None:
            report.begin(name)
            self.store.upload(
                staged.folder / name, target, lambda count: report.count_sent(name, count)
            )
            self._check(target, file)

        self._request(send)

    def _check(self, target: str, file: RemoteFile) -> None:
        size = self.store.size(target)
        if size != file.size_bytes:
            raise RemoteStoreError(
                f"{self.store.url}/{target} has {size} bytes, not {file.size_bytes}"
            )
        if file.size_bytes <= READ_BACK_BYTES:
            data = self.store.read(target) or b""
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise RemoteStoreError(f"{self.store.url}/{target} differs from what was sent")

    def _surviving(self) -> list[Stamp]:
        markers = self._request(lambda: read_markers(self.store))
        return surviving(stamps(self._request(lambda: self.store.list_files(MANIFESTS))), markers)

    def _tidy(self, newest: Stamp) -> None:
        """Remove checkpoints beyond `keep`, those no longer part of the run, and the remains of
        unfinished uploads. Manifests go first, so that none ever names a missing file."""
        kept = self._surviving()[-self.keep :]
        old = [s for s in self._stamps() if s not in kept and s.run_epoch <= newest.run_epoch]
        self._request(lambda: self.store.remove([stamp.manifest for stamp in old]))
        named = {stamp.folder for stamp in self._stamps()}
        files = self._request(lambda: self.store.list_files(CHECKPOINTS))
        left = [name for name in files if _folder(name) not in named and _older(name, newest)]
        self._request(lambda: self.store.remove(left))
        self._request(self.store.drop_unfinished)

    def _stamps(self) -> list[Stamp]:
        return stamps(self._request(lambda: self.store.list_files(MANIFESTS)))

    def _request(self, request: Callable[[], T]) -> T:
        return retry_request(request, self.wait)


def _digest(staged: Staged, name: str) -> RemoteFile:
    path = staged.folder / name
    if not path.is_file():
        raise LocalDamageError(f"{name} of step {staged.stamp.step} is missing")
    sha256 = sha256_of(path)
    committed = staged.files.get(name)
    if committed is not None and sha256 != committed:
        raise LocalDamageError(f"{name} of step {staged.stamp.step} has changed since its commit")
    return RemoteFile(sha256, path.stat().st_size)


def _folder(name: str) -> str:
    """Return `checkpoints/STAMP` for a file somewhere below it."""
    return "/".join(name.split("/")[:2])


def _older(name: str, newest: Stamp) -> bool:
    """Return True for files of an epoch up to ours: a later epoch's files are not ours to
    remove."""
    stamp = Stamp.from_text(name.split("/")[1])
    return stamp is not None and stamp.run_epoch <= newest.run_epoch
