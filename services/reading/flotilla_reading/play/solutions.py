"""Files of recorded solutions: JSON lines, one per task. They stand beside the task file, and not
in it, because a task is sent to environments and verifiers."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from flotilla_reading.data.entries import DataError


class SolutionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool by its name, with its arguments."""

    name: str
    arguments: dict[str, Any]


class Solution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Calls that solve the task `key`, in their order, and the final answer if it needs one.

    Example:
        {"key": "shop-1", "calls": [{"name": "buy", "arguments": {"id": 3}}], "answer": "bought"}
    """

    key: str
    calls: tuple[SolutionCall, ...] = ()
    answer: str | None = None


def read_solutions(path: Path) -> Mapping[str, Solution]:
    """Return the solutions of a file by the keys of their tasks. Raises DataError."""
    found: dict[str, Solution] = {}
    for number, line in _lines_of(path):
        try:
            solution = msgspec.json.decode(line, type=Solution)
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(f"{path}: line {number}: {error}") from error
        if found.setdefault(solution.key, solution) is not solution:
            raise DataError(f"{path}: line {number}: the second solution of {solution.key!r}")
    return found


def format_solutions(solutions: Iterable[Solution]) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in solutions)


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            yield number, line
