"""Files and folders that are on the disk when a function returns."""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; its folder's entry is `sync_folder`'s."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make what was created in, renamed into or removed from a folder last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
