"""A killed gateway over Fleet: its open instances end, with or without a successor."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from tests.env_gateway.backends.fleet_harness import Emulator
from tests.support.gateway_process import gateway_process, open_episode
from tests.support.waiting import until_seen

SECTION = """
[env_gateway]
backend = "fleet"
drain_s = 0.1
[env_gateway.backends.fleet]
url = "{url}"
api_key_env = "{key}"
heartbeat_interval_s = {interval}
"""
# By the emulator's clock, which passes 30 of its seconds in one of ours.
SPEED = 30


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    """Outlives gateways, as Fleet does."""
    emulator = Emulator()
    emulator.start("--speed", str(SPEED))
    yield emulator
    emulator.stop()


def gateway(
    emulator: Emulator, folder: Path, *, interval: int = 3600
) -> AbstractAsyncContextManager[tuple[asyncio.subprocess.Process, Any]]:
    config = emulator.config()
    section = SECTION.format(url=config["url"], key=config["api_key_env"], interval=interval)
    return gateway_process(folder, section)


async def live(emulator: Emulator) -> int:
    return len((await emulator.count())["instances"]["live"])


async def becomes(emulator: Emulator, instances: int, within_s: float = 15.0) -> None:
    await until_seen(lambda: live(emulator), lambda count: count == instances, within_s)


async def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def test_a_successor_deletes_what_was_open_and_what_was_being_created(
    emulator: Emulator, tmp_path: Path
) -> None:
    async with gateway(emulator, tmp_path) as (process, stub):
        for attempt in range(2):
            opened = await open_episode(stub, attempt)
            assert opened.state == pb.EPISODE_STATE_READY, opened
        # Pending at Fleet when the gateway dies, which has written down only the tag.
        await emulator.faults(create_delay=6.0)
        creating = [asyncio.create_task(open_episode(stub, attempt)) for attempt in (2, 3)]
        await becomes(emulator, 4)
        await kill(process)
        await asyncio.gather(*creating, return_exceptions=True)
    assert await live(emulator) == 4
    await emulator.faults()
    async with gateway(emulator, tmp_path) as (process, stub):
        await becomes(emulator, 0)
        opened = await open_episode(stub, 0)
        assert opened.state == pb.EPISODE_STATE_READY, opened
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert await live(emulator) == 0


async def test_without_a_successor_instances_end_for_want_of_heartbeats(
    emulator: Emulator, tmp_path: Path
) -> None:
    interval = 30 * 3
    async with gateway(emulator, tmp_path, interval=interval) as (process, stub):
        for attempt in range(2):
            opened = await open_episode(stub, attempt)
            assert opened.state == pb.EPISODE_STATE_READY, opened
        await kill(process)
    await becomes(emulator, 0, within_s=interval / SPEED + 5.0)
    stopped = (await emulator.count())["instances"]["stopped"]
    assert stopped["heartbeat"] == 2
