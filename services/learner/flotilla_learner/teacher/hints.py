"""What only the teacher is told: a text of each task. Pure."""

import json
from collections.abc import Sequence

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.text.parsing import as_object
from flotilla_learner.config.teacher import HintConfig
from flotilla_learner.sampling.tasks import Task


def hint_of(task: Task, config: HintConfig) -> str:
    """Return the message about a task. Raises ConfigError if the task has no such text."""
    value: object = json.loads(task.json)
    for name in config.key.split("."):
        value = as_object(value).get(name)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"learner.teacher.hint.key: task {task.key!r} has no text under {config.key!r}"
        )
    return config.message.replace("{hint}", value)


def check_hints(tasks: Sequence[Task], config: HintConfig) -> None:
    """Raise ConfigError, with their number and the first, if any tasks have no hint."""
    lacking: list[ConfigError] = []
    for task in tasks:
        try:
            hint_of(task, config)
        except ConfigError as error:
            lacking.append(error)
    if lacking:
        raise ConfigError(
            f"{lacking[0]}, nor have {len(lacking) - 1} others of {len(tasks)}: complete the task"
            " file, or leave learner.teacher.hint out"
        )
