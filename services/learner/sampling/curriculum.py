"""Which task comes when: a function of the seed and the sequence number, nothing else.

Environments take turns, so that every step of at least as many groups as there are
environments has all of them. Within an environment each pass over its tasks is a
permutation of its own.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

# Capability of a worker whose engine and prompts take images, and the tasks that need it.
IMAGES = "images"
_WITH_IMAGES = ("computer_use", "browser_use")


class TaskFileError(ValueError):
    """A task file is not usable; the message names the file, the place and the fix."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task, its JSON as the file has it."""

    key: str
    env_key: str
    json: str

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that a worker must have for it, in the words of LeaseGroup."""
        return _needs(self.json)


class Curriculum:
    """An endless, seeded order over tasks."""

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        if not tasks:
            raise ValueError("a curriculum needs at least one task")
        self._seed = seed
        by_env: dict[str, list[Task]] = {}
        for task in tasks:
            by_env.setdefault(task.env_key, []).append(task)
        self._by_env = [by_env[name] for name in sorted(by_env)]
        self._permutation = lru_cache(maxsize=4 * len(self._by_env))(self._shuffle)

    def task(self, sequence_number: int) -> Task:
        """The task of the `sequence_number`-th group of the run, from 0."""
        turn, env = divmod(sequence_number, len(self._by_env))
        tasks = self._by_env[env]
        epoch, position = divmod(turn, len(tasks))
        return tasks[self._permutation(env, epoch)[position]]

    def _shuffle(self, env: int, epoch: int) -> list[int]:
        order = list(range(len(self._by_env[env])))
        random.Random(f"{self._seed}/{env}/{epoch}").shuffle(order)
        return order


def load_tasks(path: Path) -> list[Task]:
    """Read a task file in either of Fleet's vocabularies. Raises TaskFileError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise TaskFileError(f"{path}: there is no such task file") from None
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path}: not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise TaskFileError(f"{path}: not JSON: {error}") from None
    rows = data.get("tasks") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise TaskFileError(
            f'{path}: expected a JSON array of tasks, or an object with the key "tasks"'
            " that holds one, and at least one task in it"
        )
    tasks = [_task(row, f"{path}: task {number}") for number, row in enumerate(rows)]
    _refuse_repeats(tasks, path)
    return tasks


@lru_cache(maxsize=4096)
def _needs(text: str) -> frozenset[str]:
    modality = json.loads(text).get("task_modality", "tool_use")
    return frozenset({IMAGES}) if modality in _WITH_IMAGES else frozenset()


def _task(row: object, where: str) -> Task:
    if not isinstance(row, dict):
        raise TaskFileError(f"{where}: expected an object, got {type(row).__name__}")
    key = _text(row, ("key", "task_key"), where)
    where = f"{where} ({key})"
    _text(row, ("prompt",), where)
    return Task(key, _text(row, ("env_key", "env_id"), where), json.dumps(row, ensure_ascii=False))


def _text(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
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
