"""Folders of a run in shared memory, where any user of the machine may create names.

Each is accessible to its user only and ends in a random part, so that no other user can create it
first. A similar name of another user is never opened, and never removed.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from flotilla_common.files.scratch_folders import scratch_folder

SHARED_MEMORY = Path("/dev/shm")


def shared_name(run_id: str, run_dir: Path) -> str:
    """Return the prefix of the names of that run's folders, unique on this machine.

    Two runs of one spec may start in the same second, in different folders, and share an id; an id
    may be a prefix of another. The digest of the run's folder distinguishes them."""
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()
    return f"flotilla-{run_id}-{digest[:12]}"


@contextmanager
def private_folder(name: str) -> Generator[Path]:
    """Make a folder whose name begins with `name`, for the duration of the block.

    Folders that a killed process has left under that name are removed first."""
    with scratch_folder(f"{name}-", SHARED_MEMORY) as (folder, _):
        yield folder


def remove_folders(name: str) -> list[Path]:
    """Remove our own folders with this prefix, in use or not; return those that remain."""
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
