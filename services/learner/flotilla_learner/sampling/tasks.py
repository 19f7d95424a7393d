"""Tasks of a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flotilla_common.tasks.task_files import read_tasks
from flotilla_common.tasks.task_format import SCREEN_MODALITIES

# Capability of a worker whose engine and prompts accept images, and of tasks that need it.
IMAGES = "images"


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


class UnseenPicturesError(Exception):
    """Raised for tasks that need images in a run whose policy sees none."""


def refuse_unseen_pictures(tasks: Sequence[Task], path: str) -> None:
    """Raise UnseenPicturesError if any of the tasks needs images."""
    seeing = [task for task in tasks if IMAGES in task.needs]
    if seeing:
        first = f"{seeing[0].key!r} first ({modality_of(seeing[0].json)})"
        raise UnseenPicturesError(
            f"{len(seeing)} of {len(tasks)} tasks of {path} are played on a screen, {first}, and"
            " the policy sees no pictures: add a table [policy.vision] for a model that reads them,"
            ' or set learner.select.modality = "tool_use"'
        )


def modality_of(text: str) -> str:
    """Return how the policy acts in a task, given its JSON."""
    return json.loads(text).get("task_modality") or "tool_use"


@lru_cache(maxsize=4096)
def _required_capabilities(text: str) -> frozenset[str]:
    return frozenset({IMAGES}) if modality_of(text) in SCREEN_MODALITIES else frozenset()
