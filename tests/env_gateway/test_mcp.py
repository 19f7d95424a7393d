"""The mcp backend against the environments' own server, as a process, over HTTP."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from environments.tasks import make_task
from services.env_gateway.adapters.http_client import http_session
from services.env_gateway.adapters.mcp import McpBackend
from services.env_gateway.adapters.process import FixedAddress, SupervisedProcess
from services.env_gateway.backend_config import McpConfig
from services.env_gateway.config import EnvGatewayConfig
from services.env_gateway.gateway import Gateway
from services.env_gateway.grading import Reason
from services.env_gateway.ports import BackendError, Orphan, Provision
from services.env_gateway.session import Outcome
from services.env_gateway.tasks import parse_task
from tests.env_gateway.grading_gateway import ENV_KEYS, grading_gateway, reward_of
from tests.env_gateway.support import open_spec, opened, until

COMMAND = (sys.executable, "-m", "environments.serve", "--port", "0")
CONFIG = McpConfig(command=COMMAND, instances=True)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server that the tests of this file share."""
    command = [*COMMAND, "--die-with-parent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


@asynccontextmanager
async def closing(backend: McpBackend) -> AsyncGenerator[McpBackend]:
    try:
        yield backend
    finally:
        await backend.close()


def backend_at(url: str) -> AbstractAsyncContextManager[McpBackend]:
    http = http_session(max_connections=64, headers={})
    return closing(McpBackend(CONFIG, FixedAddress(url), http))


@asynccontextmanager
async def gateway_over(backend: McpBackend) -> AsyncGenerator[Gateway]:
    config = EnvGatewayConfig.model_validate(
        {"backend": "mcp", "backends": {"mcp": CONFIG.model_dump()}, "open_timeout_s": 30.0}
    )
    async with grading_gateway({"mcp": backend}, config) as gateway:
        yield gateway


async def instances(backend: McpBackend, url: str) -> set[str]:
    listed = f"{url}/v1/env/instances?status=running"
    return {body["run_id"] for body in await backend.request("GET", listed, timeout_s=5.0)}


def provision(episode_id: str) -> Provision:
    task = parse_task(json.dumps(make_task("booking", "train", 0)))
    return Provision(episode_id, task, ttl_s=60.0)


async def test_the_oracle_passes_over_mcp_and_nothing_is_left_running(server: str) -> None:
    async with backend_at(server) as backend, gateway_over(backend) as gateway:
        for index, env_key in enumerate(ENV_KEYS):
            task = make_task(env_key, "train", index)
            assert await reward_of(gateway, task, act=True, attempt=2 * index) == 1.0
            assert await reward_of(gateway, task, act=False, attempt=2 * index + 1) == 0.0
        await gateway.drain(0.0)
        assert await instances(backend, server) == set()


async def test_a_server_that_dies_loses_its_episodes_and_new_ones_open() -> None:
    address = SupervisedProcess(COMMAND, start_timeout_s=30.0)
    backend = McpBackend(CONFIG, address, http_session(max_connections=4, headers={}))
    async with closing(backend), gateway_over(backend) as gateway:
        task = json.dumps(make_task("booking", "train", 0))
        session = await opened(gateway, open_spec(0, task=task))
        assert address.pid is not None
        os.killpg(address.pid, signal.SIGKILL)
        await until(lambda: address.generation == 1)
        answer, _ = await gateway.call(session, 0, next(iter(session.tools)), "{}", 5.0)
        assert answer.outcome is Outcome.SESSION_LOST
        grade = await gateway.grade(session, None, None, 5.0)
        assert grade.reason is Reason.INSTANCE_LOST
        await opened(gateway, open_spec(1, task=task))


async def test_creating_twice_with_one_request_makes_one_instance(server: str) -> None:
    async with backend_at(server) as backend:
        first = await backend.provision(provision("run.gw.1-1"), timeout_s=30.0)
        again = await backend.provision(provision("run.gw.1-1"), timeout_s=5.0)
        assert first.instance_id == again.instance_id
        assert "run.gw.1-1" in await instances(backend, server)
        await first.close(timeout_s=5.0)


async def test_an_orphan_is_found_by_its_tag_alone(server: str) -> None:
    async with backend_at(server) as backend:
        await backend.provision(provision("run.gw.2-1"), timeout_s=30.0)
        other = await backend.provision(provision("run.gw.2-2"), timeout_s=5.0)
        await backend.reclaim(Orphan("run.gw.2-1"), timeout_s=5.0)
        await backend.reclaim(Orphan("run.gw.2-1"), timeout_s=5.0)
        running = await instances(backend, server)
        assert ("run.gw.2-1" in running, "run.gw.2-2" in running) == (False, True)
        await other.close(timeout_s=5.0)


async def test_a_snapshot_equals_what_queries_show(server: str) -> None:
    async with backend_at(server) as backend:
        instance = await backend.provision(
            provision(f"run.gw.{os.urandom(4).hex()}"), timeout_s=30.0
        )
        content = await instance.snapshot("current", timeout_s=5.0)
        assert content is not None
        copy = sqlite3.connect(":memory:")
        copy.deserialize(content)
        names = await instance.query(
            "current", "SELECT name FROM sqlite_master WHERE type = 'table'", (), timeout_s=5.0
        )
        for (name,) in names.rows:
            sql = f"SELECT * FROM {name}"
            asked = await instance.query("current", sql, (), timeout_s=5.0)
            assert [list(row) for row in copy.execute(sql)] == [list(row) for row in asked.rows]
        copy.close()


async def test_a_deleted_instance_is_lost(server: str) -> None:
    async with backend_at(server) as backend:
        instance = await backend.provision(
            provision(f"run.gw.{os.urandom(4).hex()}"), timeout_s=30.0
        )
        tools = await instance.list_tools(timeout_s=5.0)
        await instance.close(timeout_s=5.0)
        await instance.close(timeout_s=5.0)
        with pytest.raises(BackendError) as caught:
            await instance.call(tools[0].name, {}, timeout_s=5.0)
        assert (caught.value.lost, caught.value.delivered) == (True, False)


async def test_a_command_that_does_not_serve_is_not_waited_for_for_ever() -> None:
    address = SupervisedProcess((sys.executable, "-c", "print('hi')"), start_timeout_s=5.0)
    try:
        with pytest.raises(BackendError, match="does not serve yet"):
            await address.url(0.5)
    finally:
        await address.close()
