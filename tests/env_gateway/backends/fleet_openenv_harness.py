"""FleetTaskEnv of Fleet's fork of OpenEnv, on Fleet's emulator; where the fork is."""

import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psutil
import pytest

from flotilla_env_gateway.adapters.fleet_openenv.backend import PATH_VARIABLE
from flotilla_env_gateway.ports import Backend
from tests.env_gateway.backends.apps import BookingTasks, stopped
from tests.env_gateway.backends.fleet_harness import Emulator
from tests.env_gateway.backends.harness import Can
from tests.support.process_commands import command_of

# An interpreter with what the fork needs, as it needs another MCP package than this repository.
PYTHON_VARIABLE = "OPENENV_FORK_PYTHON"


class FleetOpenEnvHarness(BookingTasks):
    name = "fleet_openenv"
    # It knows no hints about tools, shows no database, and repeats refused creations for minutes.
    can = frozenset({Can.CHECKS, Can.RECLAIM, Can.REFUSE})

    def __init__(self) -> None:
        self._emulator = Emulator()

    def start(self) -> None:
        if not os.environ.get(PATH_VARIABLE):
            pytest.skip(f"set {PATH_VARIABLE} to a checkout of Fleet's fork of OpenEnv")
        self._emulator.start()

    def stop(self) -> None:
        self._emulator.stop()

    def settings(self) -> Mapping[str, Any]:
        config = self._emulator.config()
        if python := os.environ.get(PYTHON_VARIABLE):
            config["python"] = python
        return {"backend": "fleet_openenv", "backends": {"fleet_openenv": config}}

    async def running(self, backend: Backend) -> int:
        return len((await self._emulator.count())["instances"]["live"])

    async def kill(self, backend: Backend, instance_id: str) -> None:
        await self._emulator.kill(instance_id)

    def frozen(self, backend: Backend) -> AbstractContextManager[None]:
        """Its processes: it would see a server that hangs through for minutes."""
        return _stopped(_workers())


@contextmanager
def _stopped(pids: list[int]) -> Generator[None]:
    with suppress(ProcessLookupError), stopped(pids):
        yield


def _workers() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [
        child.pid for child in children if "fleet_openenv_worker" in " ".join(command_of(child))
    ]


harness = FleetOpenEnvHarness
