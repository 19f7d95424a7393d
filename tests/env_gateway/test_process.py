"""The gateway as a process: its command line, and what a killed one leaves behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from environments.tasks import make_task
from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from services.common import rpc
from services.env_gateway.adapters.http_client import http_session, send

TOKEN = "process-token-0123456789"
SPEC = """
name = "test"
[policy]
model = "none"
dtype = "float32"
max_model_len = 128
[env_gateway]
backend = "mcp"
drain_s = 0.1
[env_gateway.backends.mcp]
url = "{url}"
instances = true
"""


@pytest.fixture(scope="module")
def environments() -> Iterator[str]:
    """The URL of an environment server that outlives gateways."""
    command = [sys.executable, "-m", "environments.serve", "--die-with-parent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


@asynccontextmanager
async def gateway(url: str, folder: Path) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Any]]:
    spec = folder / "spec.toml"
    spec.write_text(SPEC.format(url=url))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.env_gateway", "--config", str(spec)),
        *("--run-id", "run", "--run-dir", str(folder), "--listen", "127.0.0.1:0"),
        env={**os.environ, "FLOTILLA_TOKEN": TOKEN},
        stderr=asyncio.subprocess.PIPE,
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


async def open_episode(stub: Any, attempt: int) -> pb.OpenEpisodeResponse:
    request = pb.OpenEpisodeRequest(
        request_id=f"request-{attempt}",
        run_id="run",
        group_id="group",
        attempt_index=attempt,
        opening=1,
        task_json=json.dumps(make_task("booking", "train", attempt)),
        worker_id="rollout-0",
    )
    return [response async for response in stub.OpenEpisode(request)][-1]


async def running(url: str) -> int:
    async with http_session(max_connections=1, headers={}) as http:
        listed = f"{url}/v1/env/instances?status=running"
        body, _ = await send(http, "GET", listed, timeout_s=5.0, max_bytes=2**20)
        return len(body)


async def test_a_killed_gateway_leaves_nothing_running_once_it_is_started_again(
    environments: str, tmp_path: Path
) -> None:
    async with gateway(environments, tmp_path) as (process, stub):
        for attempt in range(3):
            assert (await open_episode(stub, attempt)).state == pb.EPISODE_STATE_READY
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert await running(environments) == 3
    async with gateway(environments, tmp_path) as (process, stub), asyncio.timeout(10.0):
        while await running(environments):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await open_episode(stub, 0)).state == pb.EPISODE_STATE_READY
        assert await running(environments) == 1
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert await running(environments) == 0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.env_gateway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_configuration_is_checked_without_starting_anything(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.format(url="http://127.0.0.1:1"))
    assert run("--config", str(spec), "--check-config").returncode == 0
    wrong = run("--config", str(spec), "--check-config", "--env_gateway.lease_tll_s=3")
    assert wrong.returncode == 2
    assert "lease_ttl_s" in wrong.stderr
