"""Which of an environment's tools the policy is offered. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.env_gateway.episodes.task_format import Task, TaskError
from services.env_gateway.ports import Tool

COMPUTER = "computer"
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
_SCREEN_ONLY = ("computer_use", "browser_use")


class NothingToOfferError(Exception):
    """The task's modality leaves none of the environment's tools."""


def offered(tools: Sequence[Tool], task: Task) -> dict[str, Tool]:
    """The tools of the task's modality by name, and `submit_final_answer` for a tool_use task
    whose prompt asks for it. Raises NothingToOfferError."""
    tools = [_ordered(tool) for tool in tools]
    if task.modality in _SCREEN_ONLY:
        chosen = {tool.name: tool for tool in tools if tool.name == COMPUTER}
        if not chosen:
            raise NothingToOfferError(
                f"the task's modality is {task.modality!r} and the environment has no tool "
                f"{COMPUTER!r} among its {len(tools)}; check the task's modality and env version"
            )
        return chosen
    joint = task.modality == "joint"
    chosen = {tool.name: tool for tool in tools if joint or tool.name != COMPUTER}
    if SUBMIT_FINAL_ANSWER.name in task.prompt:
        chosen.setdefault(SUBMIT_FINAL_ANSWER.name, SUBMIT_FINAL_ANSWER)
    if not chosen:
        raise NothingToOfferError(
            "the environment lists no tool that the policy could call; a task that needs none says "
            'so by "task_modality": "single_turn"'
        )
    return chosen


def _ordered(tool: Tool) -> Tool:
    """With its schema's keys in one order. To JSON they have none, and servers shuffle them, but
    the policy reads them as a prompt that must not depend on the way to an environment."""
    schema = json.loads(tool.input_schema_json)
    if not isinstance(schema, dict):
        return tool
    keys = sorted(schema, key=lambda key: (_KEYS.index(key) if key in _KEYS else len(_KEYS), key))
    if keys == list(schema):
        return tool
    return replace(tool, input_schema_json=json.dumps({key: schema[key] for key in keys}))


def is_final_answer(tool: Tool) -> bool:
    """Whether the gateway answers the call itself; an environment may have a tool of that name."""
    return tool is SUBMIT_FINAL_ANSWER


def final_answer(arguments: Mapping[str, Any]) -> str:
    """The submitted text. Raises TaskError, with what the policy is told."""
    answer = arguments.get("answer")
    if not isinstance(answer, str):
        raise TaskError('submit_final_answer needs one argument "answer", a string')
    return answer
