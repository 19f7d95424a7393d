"""Folders for as long as they are worked in: what a killed process has left goes with the next."""

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
def scratch(prefix: str = _PREFIX, parent: Path | None = None) -> Generator[tuple[Path, int]]:
    """The folder, and a descriptor that keeps it: a child that is handed it may work on in the
    folder when this process has been killed. It is its user's alone, in `parent`, the temporary
    directory unless given, and what follows `prefix` in its name cannot be guessed."""
    parent = parent or Path(tempfile.gettempdir())
    _sweep(prefix, parent)
    folder, keeper = _made(prefix, parent)
    try:
        yield folder, keeper
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(keeper)


def _made(prefix: str, parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        keeper = _opened(folder)
        if keeper is None:
            continue
        fcntl.flock(keeper, fcntl.LOCK_EX)
        if os.fstat(keeper).st_nlink:
            return folder, keeper
        # Another process has swept it before it was locked.
        os.close(keeper)


def _opened(folder: Path) -> int | None:
    """None for what is gone, or no folder of ours."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.fstat(descriptor).st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    return None


def _sweep(prefix: str, parent: Path) -> None:
    """Remove the folders of this user that nobody keeps."""
    for folder in parent.glob(f"{escape(prefix)}*"):
        keeper = _opened(folder)
        if keeper is None:
            continue
        with suppress(BlockingIOError):
            fcntl.flock(keeper, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(keeper)
