"""Fleet's emulator, as a process, over Fleet's own wire."""

import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import aiohttp

from flotilla_env_gateway.ports import Backend
from tests.env_gateway.backends.apps import BookingTasks, stopped
from tests.env_gateway.backends.bench import Bench, opened_bench
from tests.env_gateway.backends.harness import Can
from tests.support.environment_processes import environment_command, server_pid
from tests.support.started_process import end_process, start_process

_KEY_VARIABLE = "FLOTILLA_TEST_FLEET_KEY"
_KEY = "a key"


class Emulator:
    """One emulator. If `guarded`, it requires a key, and its runners require a token."""

    def __init__(self, *, guarded: bool = True) -> None:
        self._guarded = guarded

    def start(self, *options: str) -> None:
        self._process, line = start_process(
            environment_command("-m", "flotilla_environments.fleet_emulator", *options),
            env={**os.environ, **({"FLOTILLA_ENV_TOKEN": _KEY} if self._guarded else {})},
        )
        self._created = 0
        self.url: str = json.loads(line)["url"]
        os.environ[_KEY_VARIABLE] = _KEY

    def stop(self) -> None:
        end_process(self._process)

    @property
    def pid(self) -> int:
        return server_pid(self.url)

    def config(self, **settings: Any) -> dict[str, Any]:
        """`[env_gateway.backends.fleet]`."""
        return {"url": self.url, "api_key_env": _KEY_VARIABLE, **settings}

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {_KEY}"}
        url = self.url + path
        async with aiohttp.request(method, url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def faults(self, **faults: Any) -> None:
        """Plant faults in place of all others; none without arguments."""
        await self.call("POST", "/_emulator/faults", faults)

    async def forget(self) -> None:
        """Remove all faults, and count from here."""
        await self.faults()
        self._created = (await self.call("DELETE", "/_emulator/counters"))["instances"]["created"]

    async def count(self) -> Any:
        return await self.call("GET", "/_emulator/counters")

    async def created(self) -> int:
        return (await self.count())["instances"]["created"] - self._created

    async def kill(self, instance_id: str) -> None:
        await self.call("POST", "/_emulator/kill", {"instance_id": instance_id})


@asynccontextmanager
async def fleet_bench(emulator: Emulator, **settings: Any) -> AsyncGenerator[Bench]:
    """A gateway over an emulator that may hold faults of other tests; it leaves no instance."""
    await emulator.forget()
    async with opened_bench(FleetHarness(emulator, **settings)) as bench:
        try:
            yield bench
        finally:
            await emulator.faults()
            await bench.gateway.drain(0.0)
        assert await bench.running() == 0, "instances are left at the emulator"


class FleetHarness(BookingTasks):
    name = "fleet"
    can = frozenset(Can) - {Can.SHOW_END}

    def __init__(
        self, emulator: Emulator | None = None, *, section: Mapping[str, Any] = {}, **fleet: Any
    ) -> None:
        """`fleet` are settings of the backend, `section` others of the gateway."""
        self.emulator = emulator or Emulator()
        self._settings = {"backend": "fleet", **section}
        self._fleet = fleet

    def start(self) -> None:
        self.emulator.start()

    def stop(self) -> None:
        self.emulator.stop()

    def settings(self) -> Mapping[str, Any]:
        return {**self._settings, "backends": {"fleet": self.emulator.config(**self._fleet)}}

    async def running(self, backend: Backend) -> int:
        return len((await self.emulator.count())["instances"]["live"])

    async def kill(self, backend: Backend, instance_id: str) -> None:
        await self.emulator.kill(instance_id)

    def frozen(self, backend: Backend) -> AbstractContextManager[None]:
        return stopped([self.emulator.pid])


harness = FleetHarness
