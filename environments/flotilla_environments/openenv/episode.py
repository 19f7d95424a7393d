"""One attempt at one task, from the choice of the task to its verdict. Knows nothing of OpenEnv."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from flotilla_environments.api import ToolError, ToolSpec, open_instance
from flotilla_environments.local_verifier import Verdict, run_verifier
from flotilla_environments.task_generator import SPLITS, Split, draw_scenario, make_data_id
from flotilla_environments.tasks import verifier_source

TASKS_PER_SPLIT = 10**9
SUBMIT = ToolSpec(
    name="submit_final_answer",
    description="End the episode. Call it once, when the task is done.",
    parameters={
        "type": "object",
        "properties": {
            "answer": {
                "type": ["string", "null"],
                "description": "what to tell the user; null if the task was given up",
            }
        },
        "required": ["answer"],
        "additionalProperties": False,
    },
    read_only=False,
    idempotent=False,
)


@dataclass(frozen=True)
class Choice:
    """A client's choice of a task; the first field that is set counts."""

    data_id: str = ""
    task_key: str = ""
    split: str = ""
    index: int | None = None
    seed: int | None = None
    data_version: str = ""

    def data_id_of(self, env_key: str) -> str:
        """Return the data id; without any wish, that of a random task of `train`. Raises
        `ValueError`."""
        if self.data_id:
            return self.data_id
        if self.task_key:
            prefix = f"{env_key}-"
            if not self.task_key.startswith(prefix):
                raise ValueError(
                    f"task {self.task_key!r} is not of this environment: use {prefix}DATA_ID, such "
                    f"as {prefix}train-000123"
                )
            return self.task_key.removeprefix(prefix)
        if self.index is not None or self.split:
            return make_data_id(cast("Split", self.split or "train"), self.index or 0)
        number = random.randrange(TASKS_PER_SPLIT) if self.seed is None else self.seed
        return make_data_id("train", number % TASKS_PER_SPLIT)


class Episode:
    """An attempt at a task. Raises `ValueError` for a task that does not exist."""

    def __init__(self, env_key: str, choice: Choice) -> None:
        chosen = choice.data_id_of(env_key)
        self._instance = open_instance(env_key, chosen, choice.data_version or "v1")
        self.scenario = self._instance.scenario
        self.task_key = f"{env_key}-{chosen}"
        self.verdict: Verdict | None = None

    def tools(self) -> list[ToolSpec]:
        return [*self._instance.tools(), SUBMIT]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool and return its value. `verdict` is set once the final answer was submitted.

        Raises `ToolError`."""
        if self.verdict is not None:
            raise ToolError("the episode has ended; reset starts another")
        if name != SUBMIT.name:
            return self._instance.call(name, arguments)
        answer = arguments.get("answer")
        if set(arguments) != {"answer"} or not isinstance(answer, str | None):
            raise ToolError("answer, and nothing else, must be given: a string or null")
        source = verifier_source(self.scenario.env_key, self.scenario.kind)
        self.verdict = run_verifier(source, self._instance, answer)
        return {"ok": True}

    def close(self) -> None:
        self._instance.close()


def describe_task(env_key: str, split: str, index: int) -> dict[str, Any]:
    """Describe a task without its solution. Raises `ValueError`, and `IndexError` for the index."""
    if split in SPLITS and not 0 <= index < TASKS_PER_SPLIT:
        raise IndexError(f"index {index} is out of range: use 0 to {TASKS_PER_SPLIT - 1}")
    of = draw_scenario(env_key, make_data_id(cast("Split", split), index))
    return {
        "task_key": f"{env_key}-{of.data_id}",
        "data_id": of.data_id,
        "split": split,
        "index": index,
        "prompt": of.prompt,
        "env_variables": of.variables,
    }
