"""Digests of tasks: two tasks with one digest are equal, in whichever vocabulary they are written.

`task_digest` covers all that a task says. `question_digest` covers what a policy is asked and the
world it is asked in, so it finds a task that stands in a file under another key. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from flotilla_common.tasks.task_format import READ_FIELDS, Task

_SAID = (
    *("key", "prompt", "env_key", "env_version", "data_key", "data_version", "verifier"),
    *("modality", "raw_variables", "offered_tools", "servers"),
)
_ASKED = (
    *("prompt", "env_key", "env_version", "data_key", "data_version"),
    *("current_date", "variables"),
)


def task_digest(task: Task, fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a task, with the fields of its JSON that only others read."""
    rest = {
        name: value
        for name, value in fields.items()
        if name not in READ_FIELDS and value is not None
    }
    return _digest([*(getattr(task, name) for name in _SAID), rest])


def question_digest(task: Task) -> str:
    """Return the SHA-256 of the prompt, the environment, its version, its data and variables.

    Key, verifier and tools on offer are left out: a task with others is the same question."""
    return _digest([getattr(task, name) for name in _ASKED])


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
