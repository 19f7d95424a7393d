"""A gateway over Fleet that is killed: whatever it had open ends, with or without a successor."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from services.common import rpc
from tests.env_gateway.backends.fleet_harness import Emulator
from tests.env_gateway.test_process import TOKEN, open_episode

SPEC = """
name = "test"
[policy]
model = "none"
dtype = "float32"
max_model_len = 128
[env_gateway]
backend = "fleet"
drain_s = 0.1
[env_gateway.backends.fleet]
url = "{url}"
api_key_env = "{key}"
heartbeat_interval_s = {interval}
"""
# Of the emulator's clock, which makes 30 s of theirs pass in one of ours.
SPEED = 30


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    """Outlives gateways, as Fleet does."""
    emulator = Emulator()
    emulator.start("--speed", str(SPEED))
    yield emulator
    emulator.stop()


@asynccontextmanager
async def gateway(
    emulator: Emulator, folder: Path, *, interval: int = 3600
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Any]]:
    spec = folder / "spec.toml"
    config = emulator.config()
    spec.write_text(SPEC.format(url=config["url"], key=config["api_key_env"], interval=interval))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.env_gateway", "--config", str(spec)),
        *("--run-id", "run", "--run-dir", str(folder), "--listen", "127.0.0.1:0"),
        env={**os.environ, "FLOTILLA_TOKEN": TOKEN},
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        address = await _address(process)
        async with rpc.channel(address, token=TOKEN) as channel:
            yield process, episode_service_pb2_grpc.EpisodeServiceStub(channel)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    seen = b""
    while line := await process.stderr.readline():
        seen += line
        if b'"serving"' in line:
            return json.loads(line)["address"]
    raise AssertionError(seen.decode())


async def live(emulator: Emulator) -> int:
    return len((await emulator.count())["instances"]["live"])


async def becomes(emulator: Emulator, instances: int, within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while await live(emulator) != instances:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


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
