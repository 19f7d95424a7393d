"""Temporary folders, which exist only while they are in use.

The next process removes folders that a killed one has left."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

_PREFIX = "flotilla-scratch-"


@contextmanager
def scratch_folder(
    prefix: str = _PREFIX, parent: Path | None = None
) -> Generator[tuple[Path, int]]:
    """Make a folder; yield it, and a descriptor that keeps it.

    A child that inherits the descriptor may continue to use the folder after this process is
    killed. The folder is accessible to its user only. It lies in `parent`, by default the temporary
    directory, and the part of its name after `prefix` cannot be guessed."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(prefix, parent)
    folder, keeper = _make_folder(prefix, parent)
    try:
        yield folder, keeper
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(keeper)


def _make_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        keeper = _open_own(folder)
        if keeper is None:
            continue
        fcntl.flock(keeper, fcntl.LOCK_EX)
        if os.fstat(keeper).st_nlink:
            return folder, keeper
        # Another process swept it before it was locked.
        os.close(keeper)


def _open_own(folder: Path) -> int | None:
    """Open a folder of ours; None if it is gone or not ours."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.fstat(descriptor).st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    return None


def _remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove the folders of this user that no process keeps."""
    for folder in parent.glob(f"{escape(prefix)}*"):
        keeper = _open_own(folder)
        if keeper is None:
            continue
        with suppress(BlockingIOError):
            fcntl.flock(keeper, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(keeper)
