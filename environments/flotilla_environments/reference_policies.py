"""Two policies that bound what is learnable: a script that solves every task, and a random one."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flotilla_environments.api import ToolError, ToolSpec
from flotilla_environments.app import Call
from flotilla_environments.name_lists import LISTS
from flotilla_environments.task_generator import ALL_APPS, DATA_VERSION, Scenario, draw_scenario

_NAMES = frozenset(word for words in LISTS.values() for word in words)

CallTool = Callable[[str, dict[str, Any]], Any]  # raises ToolError for a refusal


def plan_calls(task: Mapping[str, Any] | Scenario) -> list[Call]:
    """Return the calls that solve a task, with ids known from its seed."""
    of = task if isinstance(task, Scenario) else _scenario_of(task)
    return ALL_APPS[of.env_key].kinds[of.kind].plan(of)


def _scenario_of(task: Mapping[str, Any]) -> Scenario:
    return draw_scenario(task["env_id"], task["data_id"], task.get("data_version", DATA_VERSION))


def solve_task(task: Mapping[str, Any] | Scenario, call: CallTool) -> None:
    """Solve a task like a good policy: every id that it writes with was read from a result.

    Raises `LookupError` if no result shows an id that the plan needs.
    """
    seen: set[int] = set()
    for name, arguments in plan_calls(task):
        for argument, value in arguments.items():
            if argument.endswith("_id") and value not in seen:
                raise LookupError(f"{name} needs {argument} {value}, which no result has shown")
        seen.update(ids_in(call(name, arguments)))


def ids_in(result: Any) -> list[int]:
    """Return the ids that a tool result shows."""
    return [row["id"] for row in result if "id" in row] if isinstance(result, list) else []


def play_randomly(
    prompt: str, tools: Sequence[ToolSpec], call: CallTool, rng: random.Random, max_calls: int = 5
) -> None:
    """Make one to `max_calls` random calls, with names of the prompt and ids seen in results."""
    words = [word.strip(".,") for word in prompt.split()]
    words = [word for word in words if word in _NAMES or word.isdigit()]
    ids: list[int] = []
    for _ in range(rng.randint(1, max_calls)):
        tool = rng.choice(tools)
        arguments = {
            name: _random_argument(name, schema, words, ids, rng)
            for name, schema in tool.parameters["properties"].items()
        }
        try:
            ids += ids_in(call(tool.name, arguments))
        except ToolError:
            continue


def _random_argument(
    name: str,
    schema: Mapping[str, Any],
    words: Sequence[str],
    ids: Sequence[int],
    rng: random.Random,
) -> str | int:
    if schema["type"] == "string":
        return rng.choice([word for word in words if not word.isdigit()])
    if name.endswith("_id"):
        return rng.choice(ids) if ids else rng.randint(10, 99)
    numbers = [int(word) for word in words if word.isdigit()]
    return rng.choice(numbers) if numbers else rng.randint(1, 9)
