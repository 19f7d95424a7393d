"""Prompts in better words, written by a model. Pure.

What a model writes is taken only if it still says all that the task needs, and nothing that a
prompt or a template would read otherwise."""

import json
import re
from collections.abc import Mapping, Sequence

from flotilla_reading.own_tools.task_making import MadeTask
from flotilla_reading.own_tools.values import leaves_of

_ASK = (
    "Write this request to an assistant as a person would, in one or two sentences. It has to ask"
    " for the same, in the same order. Keep every name, number and text in quotes exactly as it is."
    " Answer with the request alone.\n\n"
)
# Beside these, only what is printable may stand in a prompt.
_ACTING = re.compile(r"[<>{}|\\`]|\$\(")
_LONGEST = 4


def ask_for_prose(task: MadeTask) -> list[dict[str, str]]:
    """Return the conversation that asks a model for other words."""
    return [{"role": "user", "content": _ASK + task.prompt}]


def read_prose(text: str, task: MadeTask) -> str | None:
    """Return the prompt that a model has written; None if it lost a value of the solution's calls,
    tells the answer, or is no plain line of text."""
    prose = " ".join(text.split())
    is_plain = prose.isprintable() and not _ACTING.search(prose)
    if not prose or not is_plain or len(prose) > _LONGEST * len(task.prompt) + 80:
        return None
    if any(not _says(prose, value) for value in _needed(task)):
        return None
    if task.answer is not None and _says(prose, task.answer):
        return None
    return prose


def _needed(task: MadeTask) -> Sequence[str]:
    """Return the values that the plain prompt has of the calls' arguments."""
    values = (str(value) for call in task.calls for _, value in leaves_of(call.arguments))
    said = task.prompt + json.dumps(task.prompt, ensure_ascii=False)
    return [value for value in values if value in said and value not in ("True", "False")]


def _says(prose: str, value: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", prose) is not None


def describe_answers(kept: str, failed: Mapping[str, int]) -> str:
    """Return in one line what was kept of a model's answers, and why the others were not."""
    return "; ".join([kept, *(f"{count}: {reason}" for reason, count in failed.items())])
