"""Clients of FleetTaskEnv's shape, and the gateway that they use."""

from dataclasses import dataclass
from typing import Any

from flotilla_env_gateway.clients.fleet_task_env import FleetTaskEnv, make_fleet_task_env
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import VERIFIER
from tests.support.threaded_gateway import TOKEN, ServedGateway
from tests.support.waiting import wait_until

TASK = {
    "task_key": "task-1",
    "prompt": "Count to one.",
    "env_key": "fake",
    "env_version": "v1",
    "verifier_code": VERIFIER,
    "task_modality": "tool_use",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    for name, description in (("look", "Reads the counter."), ("add", "Adds to the counter."))
]


@dataclass(slots=True)
class Here:
    """A gateway, and clients of it."""

    served: ServedGateway

    def env(self, **keywords: Any) -> FleetTaskEnv:
        task = {**TASK, **keywords.pop("task", {})}
        address = self.served.address
        return make_fleet_task_env(task, gateway=address, token=TOKEN, **keywords)

    @property
    def backend(self) -> ScriptedBackend:
        return self.served.backend

    @property
    def grader(self) -> FakeGrader:
        return self.served.grader

    def wait_until_closed(self) -> None:
        """Closing continues in the background."""
        wait_until(lambda: not self.backend.running)


def observation(step: int, result: Any = None, **changes: Any) -> dict[str, Any]:
    reported = {
        "prompt": "Count to one.",
        "observation": {} if result is None else result,
        "step": step,
        "task_key": "task-1",
        "modality": "tool_use",
        "tools": TOOLS,
    }
    return reported | changes
