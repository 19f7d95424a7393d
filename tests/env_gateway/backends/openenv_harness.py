"""The booking app, served by the openenv package."""

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from flotilla_env_gateway.ports import Backend
from tests.env_gateway.backends.apps import BookingTasks, stopped
from tests.env_gateway.backends.harness import Can
from tests.support.openenv_servers import cut, sessions
from tests.support.started_process import end_process, start_process

_COMMAND = (
    sys.executable,
    "-m",
    "flotilla_environments.serve",
    "booking",
    "--openenv",
    "--die-with-parent",
)


class OpenEnvHarness(BookingTasks):
    name = "openenv"
    can = frozenset({Can.CHECKS, Can.REFUSE_DATA, Can.DIE, Can.ANNOTATE, Can.REFUSE, Can.SHOW_END})

    def start(self) -> None:
        self._process, line = start_process(_COMMAND)
        self._url = json.loads(line)["url"]

    def stop(self) -> None:
        end_process(self._process)

    def settings(self) -> Mapping[str, Any]:
        # What `reset` shows is the prompt again.
        config = {"url": self._url, "first_observation": []}
        return {"backend": "openenv", "backends": {"openenv": config}}

    async def running(self, backend: Backend) -> int:
        return await sessions(self._url, backend)

    async def kill(self, backend: Backend, instance_id: str) -> None:
        await cut(backend, instance_id)

    def frozen(self, backend: Backend) -> AbstractContextManager[None]:
        return stopped([self._process.pid])


harness = OpenEnvHarness
