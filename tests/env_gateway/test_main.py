"""The gateway as a process: its command line, and the remains of a killed one."""

import asyncio
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from services.common.parsing import TextLimits
from services.env_gateway.adapters.http_client import exchange_json, open_http_session
from tests.support.environment_processes import environment_command
from tests.support.gateway_process import gateway_process, open_episode, write_spec

SECTION = """
[env_gateway]
backend = "mcp"
drain_s = 0.1
[[env_gateway.servers]]
url = "{url}"
instances = true
"""


@pytest.fixture(scope="module")
def environments() -> Iterator[str]:
    """The URL of an environment server that outlives gateways."""
    command = environment_command("-m", "environments.serve")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


async def running(url: str) -> int:
    async with open_http_session(max_connections=1, headers={}) as http:
        listed = f"{url}/v1/env/instances?status=running"
        body, _ = await exchange_json(
            http, "GET", listed, timeout_s=5.0, limits=TextLimits(2**20, 2**16)
        )
        return len(body)


async def test_a_killed_gateway_leaves_nothing_running_once_it_is_started_again(
    environments: str, tmp_path: Path
) -> None:
    section = SECTION.format(url=environments)
    async with gateway_process(tmp_path, section) as (process, stub):
        for attempt in range(3):
            assert (await open_episode(stub, attempt)).state == pb.EPISODE_STATE_READY
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert await running(environments) == 3
    async with gateway_process(tmp_path, section) as (process, stub), asyncio.timeout(10.0):
        while await running(environments):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await open_episode(stub, 0)).state == pb.EPISODE_STATE_READY
        assert await running(environments) == 1
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert await running(environments) == 0


async def test_a_gateway_may_hold_more_connections_than_the_usual_limit_on_files(
    environments: str, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        async with gateway_process(tmp_path, SECTION.format(url=environments)) as (process, _):
            allowed = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == min(hard, 65536) > 1024


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.env_gateway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_configuration_is_checked_without_starting_anything(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, SECTION.format(url="http://127.0.0.1:1"))
    assert run("--config", str(spec), "--check-config").returncode == 0
    wrong = run("--config", str(spec), "--check-config", "--env_gateway.lease_tll_s=3")
    assert wrong.returncode == 2
    assert "lease_ttl_s" in wrong.stderr
