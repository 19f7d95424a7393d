"""Selection of the environment's tools to offer to the policy. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flotilla_common.tasks.task_format import SCREEN_MODALITIES, Task, TaskError
from flotilla_env_gateway.ports import Tool
from flotilla_env_gateway.tools.action_vocabularies import COMPUTER
from flotilla_env_gateway.tools.spoken_screen import find_screen_tools

SUBMIT_FINAL_ANSWER = Tool(
    "submit_final_answer",
    "Submits your final answer to the task and ends the episode. Call it once, when you are done.",
    json.dumps(
        {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        }
    ),
)
_KEYS = ("type", "properties", "required")
# Number of names in an error.
_SHOWN = 40


class NothingToOfferError(Exception):
    """The task's modality excludes all of the environment's tools, or those that the task names."""


def select_named(chosen: Mapping[str, Tool], task: Task) -> Mapping[str, Tool]:
    """Select those of its modality's tools that the task names, or all. Raises
    NothingToOfferError."""
    if not task.offered_tools or task.modality in SCREEN_MODALITIES:
        return chosen
    for name in task.offered_tools:
        if name not in chosen:
            raise NothingToOfferError(
                f"offered_tools: {task.env_key} has no {name[:100]!r} for {task.modality} tasks; it"
                f" has: {_list_names(chosen)}"
            )
    kept = {*task.offered_tools}
    if SUBMIT_FINAL_ANSWER.name in task.prompt:
        kept.add(SUBMIT_FINAL_ANSWER.name)
    return {name: tool for name, tool in chosen.items() if name in kept}


def select_of_modality(tools: Sequence[Tool], task: Task) -> dict[str, Tool]:
    """Select all tools that a task of this modality may be offered, with `submit_final_answer` if
    its prompt mentions that. Raises NothingToOfferError."""
    tools = [_order_schema_keys(tool) for tool in tools]
    if task.modality in SCREEN_MODALITIES:
        return _select_screen(tools, task)
    hidden = [] if task.modality == "joint" else find_screen_tools(tools)
    chosen = {tool.name: tool for tool in tools if tool not in hidden}
    if SUBMIT_FINAL_ANSWER.name in task.prompt:
        chosen.setdefault(SUBMIT_FINAL_ANSWER.name, SUBMIT_FINAL_ANSWER)
    if not chosen:
        raise NothingToOfferError(
            "the environment lists no tool that the policy could call; for a task that needs none, "
            'set "task_modality": "single_turn"'
        )
    return chosen


def _list_names(tools: Mapping[str, Tool]) -> str:
    names = list(tools)
    more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _select_screen(tools: Sequence[Tool], task: Task) -> dict[str, Tool]:
    chosen = {tool.name: tool for tool in find_screen_tools(tools)}
    if not chosen:
        raise NothingToOfferError(
            f"the task's modality is {task.modality!r} and the environment has no tool "
            f"{COMPUTER!r} among its {len(tools)}; check the task's modality and env version"
        )
    return chosen


def _order_schema_keys(tool: Tool) -> Tool:
    """Return the tool with its schema's keys in one fixed order. JSON gives them no order and
    servers shuffle them, but the policy reads them as a prompt, which must not depend on
    the path to an environment."""
    schema = json.loads(tool.input_schema_json)
    if not isinstance(schema, dict):
        return tool
    keys = sorted(schema, key=lambda key: (_KEYS.index(key) if key in _KEYS else len(_KEYS), key))
    if keys == list(schema):
        return tool
    return replace(tool, input_schema_json=json.dumps({key: schema[key] for key in keys}))


def parse_final_answer(arguments: Mapping[str, Any]) -> str:
    """Return the submitted text. Raises TaskError with the message for the policy."""
    answer = arguments.get("answer")
    if not isinstance(answer, str):
        raise TaskError('submit_final_answer needs one argument "answer", a string')
    return answer
