"""Folders of a run in shared memory, where any user of the machine may make names.

Each is its user's alone and ends in what nobody can guess, so that nobody else can have it first.
What another user puts beside it under a like name is never opened, and never removed.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from services.common.scratch_folders import scratch_folder

SHARED_MEMORY = Path("/dev/shm")


def shared_name(run_id: str, run_dir: Path) -> str:
    """Return the beginning of the name of each folder of that run, and of no other on this machine.

    Two runs of one spec may begin in the same second, in different folders, and have one id; an
    id may begin another. The digest of the run's folder tells them apart."""
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()
    return f"flotilla-{run_id}-{digest[:12]}"


@contextmanager
def private_folder(name: str) -> Generator[Path]:
    """Make a folder whose name begins with `name`, for as long as the block runs.

    What a process that was killed has left under that name is removed first."""
    with scratch_folder(f"{name}-", SHARED_MEMORY) as (folder, _):
        yield folder


def remove_folders(name: str) -> list[Path]:
    """Remove our own folders whose names begin so, in use or not; return what is still there."""
    for path in _own_folders(name):
        shutil.rmtree(path, ignore_errors=True)
    return _own_folders(name)


def _own_folders(name: str) -> list[Path]:
    return [path for path in SHARED_MEMORY.glob(f"{escape(name)}-*") if _is_own(path)]


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        # It was removed meanwhile.
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
