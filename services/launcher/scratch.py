"""Folders for as long as they are worked in: what a killed process has left goes with the next."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "flotilla-scratch-"


@contextmanager
def scratch() -> Generator[tuple[Path, int]]:
    """The folder, and a descriptor that keeps it: a child that is handed it may work on in the
    folder when this process has been killed."""
    _sweep()
    folder, keeper = _made()
    try:
        yield folder, keeper
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(keeper)


def _made() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
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


def _sweep() -> None:
    """Remove the folders of this user that nobody keeps."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        keeper = _opened(folder)
        if keeper is None:
            continue
        with suppress(BlockingIOError):
            fcntl.flock(keeper, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(keeper)
