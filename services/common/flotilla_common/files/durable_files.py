"""Atomic writes of files, and writes that are on disk when a function returns."""

import hashlib
import mmap
import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; `sync_path` fsyncs its entry in the folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically: readers find its old content or the new. `mode` are the permissions
    before the umask. If it raises OSError, as on a full disk, nothing is left behind."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def remove_cut_line(path: Path) -> None:
    """Remove the last line of a file whose writer was killed before the line's end."""
    with path.open("rb+") as file:
        if file.seek(0, os.SEEK_END):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                whole = data.rfind(b"\n") + 1
            file.truncate(whole)


def sync_path(path: Path) -> None:
    """Fsync a file's content, or the entries of a folder that were created, renamed or removed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
