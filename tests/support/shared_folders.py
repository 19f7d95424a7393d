"""Folders that are filled once in a test session, for every worker of pytest-xdist."""

import fcntl
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Path below a folder, size, time of the last change in nanoseconds.
Listing = list[tuple[str, int, int]]


class SharedFolders:
    """Folders by name. Tests read them; one that changes a folder copies it first."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._listings: dict[Path, Listing] = {}

    def filled_by(self, fill: Callable[[Path], object], name: str) -> Path:
        """Return the folder `name`, which `fill` has made at the path that it was given."""
        with self.filling(name) as fresh:
            if fresh is not None:
                fill(fresh)
        return self.folder(name)

    @contextmanager
    def filling(self, name: str) -> Generator[Path | None]:
        """Yield a path to make the folder at, or None once that is done; others wait meanwhile."""
        with (self._parent / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (self._parent / name).exists():
                yield None
                return
            fresh = self._parent / f"{name}.partial"
            # The remains of a worker that failed or was killed.
            shutil.rmtree(fresh, ignore_errors=True)
            yield fresh
            fresh.rename(self._parent / name)

    def folder(self, name: str) -> Path:
        """Return a folder that has been filled."""
        found = self._parent / name
        self._listings.setdefault(found, _list_files(found))
        return found

    def check_unchanged(self) -> None:
        """Raise AssertionError if a folder is not as this worker first saw it."""
        for folder, before in self._listings.items():
            assert _list_files(folder) == before, f"a test has changed {folder}: let it copy it"


def _list_files(folder: Path) -> Listing:
    stats = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in stats]


@pytest.fixture(scope="session")
def shared_folders(tmp_path_factory: pytest.TempPathFactory) -> Generator[SharedFolders]:
    """Shared by the workers of this session, and by no other session: the code may have changed."""
    base = tmp_path_factory.getbasetemp()
    folders = SharedFolders(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
    yield folders
    folders.check_unchanged()
