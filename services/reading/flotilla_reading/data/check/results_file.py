"""The file of results while tasks are checked: each is on disk when its task has ended."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flotilla_common.files.durable_files import replace_file, sync_path
from flotilla_common.tasks.task_checks import TaskCheck, format_check, read_checks
from flotilla_reading.data.check.verdicts import CHECKER


class ResultsFile:
    """An open file of results; `known` are those by task."""

    def __init__(self, path: Path, known: Mapping[str, TaskCheck], descriptor: int) -> None:
        self.path = path
        self.known = dict(known)
        self._descriptor = descriptor

    def find(self, key: str, digest: str, solution: str) -> TaskCheck | None:
        """Return the final result of exactly this task and solution, if there is one."""
        known = self.known.get(key)
        if known is None or not known.is_final or known.checker != CHECKER:
            return None
        return known if (known.digest, known.solution) == (digest, solution) else None

    def add(self, check: TaskCheck) -> None:
        """Add a result durably, in place of an earlier one."""
        os.write(self._descriptor, format_check(check))
        os.fsync(self._descriptor)
        self.known[check.key] = check


@contextmanager
def open_results(path: Path) -> Generator[ResultsFile]:
    """Open a file of results, or create it. Raises CheckFileError and OSError."""
    known = read_checks(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    # One line for each task, and none that was cut off.
    replace_file(path, b"".join(map(format_check, known.values())))
    sync_path(path)
    sync_path(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        yield ResultsFile(path, known, descriptor)
    finally:
        os.close(descriptor)
