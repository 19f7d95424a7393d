"""The environment that `openenv init` creates, as the package has it: one action, no tools."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from flotilla_env_gateway.ports import Backend
from tests.env_gateway.backends.apps import stopped
from tests.env_gateway.backends.harness import Call, Can
from tests.support.openenv_servers import cut, example_command, sessions
from tests.support.started_process import end_process, start_process


class OpenEnvExampleHarness:
    """It rewards messages by their length: 1.0 for ten characters."""

    name = "openenv_example"
    can = frozenset({Can.DIE, Can.SHOW_END})
    read_call: Call = ("step", {"message": ""})
    write_call: Call = ("step", {"message": "hello"})
    bad_call: Call = ("step", {"nonsense": 1})
    refused_call = bad_call
    untouched_reward = None

    def start(self) -> None:
        self._process, line = start_process(example_command("echo"))
        self._url = json.loads(line)["url"]

    def stop(self) -> None:
        end_process(self._process)

    def settings(self) -> Mapping[str, Any]:
        return {"backend": "openenv", "backends": {"openenv": {"url": self._url}}}

    def task(self, index: int) -> Mapping[str, Any]:
        return {"key": f"echo-{index}", "prompt": "Say something long.", "env_id": "echo"}

    def solution(self, index: int) -> Sequence[Call]:
        return [("step", {"message": f"message {index:02d}"})]

    async def running(self, backend: Backend) -> int:
        return await sessions(self._url, backend)

    async def kill(self, backend: Backend, instance_id: str) -> None:
        await cut(backend, instance_id)

    def frozen(self, backend: Backend) -> AbstractContextManager[None]:
        return stopped([self._process.pid])


harness = OpenEnvExampleHarness
