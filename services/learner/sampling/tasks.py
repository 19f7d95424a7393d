"""Tasks of a run."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from services.common.tasks.task_files import read_tasks

# Capability of a worker whose engine and prompts accept images, and of tasks that need it.
IMAGES = "images"
_WITH_IMAGES = ("computer_use", "browser_use")


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
    """Read a task file. What the env_gateway would refuse of it is refused here, before a run
    starts. Raises TaskFileError."""
    read = read_tasks(path, may_be_empty=may_be_empty)
    return [Task(each.task.key, each.task.env_key, each.text) for each in read]


def modality_of(text: str) -> str:
    """Return how the policy acts in a task, given its JSON."""
    return json.loads(text).get("task_modality") or "tool_use"


@lru_cache(maxsize=4096)
def _required_capabilities(text: str) -> frozenset[str]:
    return frozenset({IMAGES}) if modality_of(text) in _WITH_IMAGES else frozenset()
