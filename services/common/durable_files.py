"""Writes of files and folders that are on disk when a function returns."""

import hashlib
import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; `sync_path` fsyncs its entry in the folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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
