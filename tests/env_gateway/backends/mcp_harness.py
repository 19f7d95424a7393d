"""The environments' own server, as a process, over HTTP."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import aiohttp

from flotilla_env_gateway.ports import Backend
from tests.env_gateway.backends.apps import BookingTasks, stopped
from tests.env_gateway.backends.harness import Can
from tests.support.environment_processes import environment_command, server_pid
from tests.support.started_process import end_process, start_process


class McpHarness(BookingTasks):
    name = "mcp"
    can = frozenset(Can) - {Can.SHOW_END}

    def start(self) -> None:
        command = environment_command("-m", "flotilla_environments.serve", "--port", "0")
        self._process, line = start_process(command)
        self._url = json.loads(line)["url"]

    def stop(self) -> None:
        end_process(self._process)

    def settings(self) -> Mapping[str, Any]:
        return {"backend": "mcp", "servers": [{"url": self._url, "instances": True}]}

    async def running(self, backend: Backend) -> int:
        url = f"{self._url}/v1/env/instances?status=running"
        async with aiohttp.request("GET", url) as answer:
            return len(await answer.json())

    async def kill(self, backend: Backend, instance_id: str) -> None:
        url = f"{self._url}/v1/env/instances/{instance_id}"
        async with aiohttp.request("DELETE", url) as answer:
            assert answer.status == 200, await answer.text()

    def frozen(self, backend: Backend) -> AbstractContextManager[None]:
        return stopped([server_pid(self._url)])


harness = McpHarness
