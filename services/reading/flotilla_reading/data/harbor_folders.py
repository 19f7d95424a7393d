"""Folders of Harbor tasks, as rows: each has task.toml and instruction.md, and lies in the folder
itself or one below it."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

from flotilla_reading.data.entries import DataError

_CONFIG, _INSTRUCTION = "task.toml", "instruction.md"


def is_harbor(folder: Path) -> bool:
    return next(_find_tasks(folder), None) is not None


def read_harbor(folder: Path) -> bytes:
    """Return the tasks of a folder as a JSON array of {"folder", "task_toml", "instruction"}.
    Raises DataError for a task that cannot be read."""
    rows = [
        {
            "folder": task.resolve().name,
            "task_toml": _read_config(task / _CONFIG),
            "instruction": _read_text(task / _INSTRUCTION),
        }
        for task in sorted(_find_tasks(folder))
    ]
    return json.dumps(rows, default=str).encode()


def _find_tasks(folder: Path) -> Iterator[Path]:
    return (path.parent for path in (*folder.glob(_CONFIG), *folder.glob(f"*/{_CONFIG}")))


def _read_config(path: Path) -> object:
    try:
        return tomllib.loads(_read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not TOML: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error
