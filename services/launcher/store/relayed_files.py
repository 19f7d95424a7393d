"""Files of a run about its agents' episodes, for sending to remote readers.

The journal is copied first, so that readers see a consistent state. No other file of the run's
folder is ever opened, and no link is followed."""

import hashlib
import os
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

from services.launcher.store.run_files import JOURNAL, SPEC_FILE

BLOCK_BYTES = 128 << 10
DIGEST_BYTES = 16
# Largest file: the digests of its blocks, and other files' names, must fit into one message.
MOST_BYTES = 4 << 30
# A copy of the journal must leave this much disk space for the run.
_LEAST_FREE_BYTES = 1 << 30
# Newest token statistics to send. A run keeps `learner.dumps.keep` of them.
_MOST_STATS = 200
_SINGLE = (
    *("metrics.jsonl", "alarms.jsonl", "summary.json", SPEC_FILE),
    *("token_stats/pruned.jsonl", "model/tokenizer.json"),
)
_STATS = re.compile(r"token_stats/step_[0-9]{1,12}\.npz")
_COPY = ".relayed-"
_LEFT_S = 3600.0


class NoJournalError(Exception):
    """The folder has no journal."""


class NoRoomError(Exception):
    """The journal cannot be copied; the message states the cause."""


class TooLargeError(Exception):
    """The journal exceeds the size limit; the message has its size."""


@dataclass(frozen=True, slots=True)
class KnownCopy:
    """Copy of a file that a reader holds: its version, and the digests of its blocks."""

    version: str
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class RelayedFile:
    """One file: its path in the run's folder, version, size in bytes, and modification time in
    nanoseconds."""

    path: str
    version: str
    size: int
    modified_ns: int


def is_relayed(path: str) -> bool:
    """Return whether the file at this path may be sent."""
    return path == JOURNAL or path in _SINGLE or _STATS.fullmatch(path) is not None


def digest_of(block: bytes) -> bytes:
    """Return the digest of a block."""
    return hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest()


@contextmanager
def opened_files(run_dir: Path, known: Mapping[str, KnownCopy]) -> Generator["RunFiles"]:
    """Open the files of a run; its journal is copied unless `known` has its version.

    Raises NoJournalError, NoRoomError, TooLargeError."""
    _remove_left_copies(run_dir)
    version, modified_ns = _journal_version(run_dir)
    copy: BinaryIO | None = None
    size = 0
    try:
        if known.get(JOURNAL, KnownCopy("")).version != version:
            copy = _copy_journal(run_dir)
            size = os.fstat(copy.fileno()).st_size
        journal = RelayedFile(JOURNAL, version, size, modified_ns)
        yield RunFiles(run_dir, known, copy, (journal, *_list_files(run_dir)))
    finally:
        if copy is not None:
            copy.close()


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Files of a run at one moment. `journal` is a copy of it, None if the reader has it."""

    run_dir: Path
    known: Mapping[str, KnownCopy]
    journal: BinaryIO | None
    files: tuple[RelayedFile, ...]

    def changed(self) -> list[RelayedFile]:
        """Return the files that the reader lacks or has in another version; the journal last."""
        found = [f for f in self.files if self._known(f.path).version != f.version]
        return sorted(found, key=lambda file: file.path == JOURNAL)

    def read_changed(self, file: RelayedFile) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, block) of a file, without blocks that the reader has.

        Raises OSError if the file has vanished or shrunk since it was listed."""
        digests = self._known(file.path).digests
        with self._open(file.path) as source:
            for offset in range(0, file.size, BLOCK_BYTES):
                block = source.read(min(BLOCK_BYTES, file.size - offset))
                if not block:
                    raise OSError(f"{file.path} has shrunk")
                at = offset // BLOCK_BYTES * DIGEST_BYTES
                if digests[at : at + DIGEST_BYTES] != digest_of(block):
                    yield offset, block

    def _known(self, path: str) -> KnownCopy:
        return self.known.get(path, KnownCopy(""))

    @contextmanager
    def _open(self, path: str) -> Generator[BinaryIO]:
        if path == JOURNAL and self.journal is not None:
            self.journal.seek(0)
            yield self.journal
            return
        with os.fdopen(_open_inside(self.run_dir, path), "rb") as file:
            yield file


def _list_files(run_dir: Path) -> list[RelayedFile]:
    stats = sorted(f"token_stats/{path.name}" for path in run_dir.glob("token_stats/step_*.npz"))
    newest = [path for path in stats if is_relayed(path)][-_MOST_STATS:]
    return [found for path in (*_SINGLE, *newest) if (found := _describe(run_dir, path))]


def _describe(run_dir: Path, path: str) -> RelayedFile | None:
    """Describe a file; None if it is missing, a link, or too large."""
    try:
        handle = _open_inside(run_dir, path)
    except OSError:
        return None
    found = os.fstat(handle)
    os.close(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
        return None
    version = f"{found.st_mtime_ns}-{found.st_size}"
    return RelayedFile(path, version, found.st_size, found.st_mtime_ns)


def _open_inside(run_dir: Path, path: str) -> int:
    """Open a file of the run's folder without following a link at any level. Raises OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    *folders, name = path.split("/")
    handle = os.open(run_dir, flags | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, flags | os.O_DIRECTORY, dir_fd=handle)
            os.close(handle)
            handle = inner
        return os.open(name, flags, dir_fd=handle)
    finally:
        os.close(handle)


def _journal_version(run_dir: Path) -> tuple[str, int]:
    """Return a text that changes with each commit, and the time of the last one."""
    marks: list[tuple[int, int]] = []
    for name in (JOURNAL, f"{JOURNAL}-wal"):
        found = _describe_plainly(run_dir / name)
        # An empty write-ahead log appears and vanishes with the journal's readers.
        if found is not None and found[1]:
            marks.append(found)
        elif name == JOURNAL:
            raise NoJournalError
    size = sum(size for _, size in marks)
    if size > MOST_BYTES:
        raise TooLargeError(
            f"the journal has {size / 2**30:.1f} GiB; the limit is {MOST_BYTES / 2**30:g} GiB"
        )
    return "+".join(f"{ns}-{size}" for ns, size in marks), max(ns for ns, _ in marks)


def _describe_plainly(path: Path) -> tuple[int, int] | None:
    """Return the time in nanoseconds and the size of a regular file; None for all others."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _remove_left_copies(run_dir: Path) -> None:
    """Remove copies left by launchers that were killed."""
    for path in run_dir.glob(f"{_COPY}*"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _LEFT_S:
                path.unlink()


def _copy_journal(run_dir: Path) -> BinaryIO:
    size = (run_dir / JOURNAL).stat().st_size
    free = shutil.disk_usage(run_dir).free
    if free < size + _LEAST_FREE_BYTES:
        raise NoRoomError(
            f"a copy of the journal takes {size / 2**30:.1f} GiB, but {run_dir} has only"
            f" {free / 2**30:.1f} GiB left: free disk space there"
        )
    handle, name = mkstemp(prefix=_COPY, dir=run_dir)
    copy = os.fdopen(handle, "rb")
    try:
        uri = f"{(run_dir / JOURNAL).absolute().as_uri()}?mode=ro"
        with (
            closing(sqlite3.connect(uri, uri=True, timeout=30)) as journal,
            closing(sqlite3.connect(name)) as target,
        ):
            target.execute("PRAGMA synchronous = OFF")
            # In one step: each commit of the learner would restart a copy in pieces.
            journal.backup(target)
            # Readers of the copy need no write-ahead log.
            target.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        copy.close()
        raise NoRoomError(f"cannot copy the journal: {error}") from error
    finally:
        Path(name).unlink(missing_ok=True)
    return copy
