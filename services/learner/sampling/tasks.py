"""Tasks and their files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from services.common.domain.task_fields import describe_unknown_field

# Capability of a worker whose engine and prompts accept images, and of tasks that need it.
IMAGES = "images"
_WITH_IMAGES = ("computer_use", "browser_use")


class TaskFileError(ValueError):
    """A task file is not usable; the message names the file, the place and the fix."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task, with its JSON as in the file."""

    key: str
    env_key: str
    json: str

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that a worker must have for it, as named in LeaseGroup."""
        return _required_capabilities(self.json)


def load_tasks(path: Path, *, may_be_empty: bool = False) -> list[Task]:
    """Read a task file in either of Fleet's vocabularies. Raises TaskFileError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise TaskFileError(f"{path}: there is no such task file") from None
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path}: not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise TaskFileError(f"{path}: not JSON: {error}") from None
    rows = data.get("tasks") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not (rows or may_be_empty):
        raise TaskFileError(
            f'{path}: expected a JSON array of tasks, or an object with the key "tasks"'
            " that holds one, and at least one task in it"
        )
    tasks = [_parse_task(row, f"{path}: task {number}") for number, row in enumerate(rows)]
    _refuse_repeats(tasks, path)
    return tasks


def modality_of(text: str) -> str:
    """Return how the policy acts in a task, given its JSON."""
    return json.loads(text).get("task_modality") or "tool_use"


@lru_cache(maxsize=4096)
def _required_capabilities(text: str) -> frozenset[str]:
    return frozenset({IMAGES}) if modality_of(text) in _WITH_IMAGES else frozenset()


def _parse_task(row: object, where: str) -> Task:
    if not isinstance(row, dict):
        raise TaskFileError(f"{where}: expected an object, got {type(row).__name__}")
    key = _require_text(row, ("key", "task_key"), where)
    where = f"{where} ({key})"
    if unknown := describe_unknown_field(row):
        raise TaskFileError(f"{where}: {unknown}")
    _require_text(row, ("prompt",), where)
    return Task(
        key, _require_text(row, ("env_key", "env_id"), where), json.dumps(row, ensure_ascii=False)
    )


def _require_text(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value
    raise TaskFileError(f"{where}: needs a non-empty string {' or '.join(map(repr, names))}")


def _refuse_repeats(tasks: Sequence[Task], path: Path) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.key in seen:
            raise TaskFileError(f"{path}: two tasks have the key {task.key!r}; make keys unique")
        seen.add(task.key)
