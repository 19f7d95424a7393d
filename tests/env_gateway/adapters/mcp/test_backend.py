"""The mcp backend against the environments' own server, as a process, over HTTP."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.mcp.backend import McpBackend
from flotilla_env_gateway.adapters.supervised_server import FixedAddress, SupervisedServer
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import BackendError, ProvisionRequest
from flotilla_environments.tasks import make_task
from tests.support.environment_processes import environment_command
from tests.support.fake_gateway import open_spec, opened
from tests.support.grading_gateway import grading_gateway
from tests.support.http_answers import serve_answers
from tests.support.started_process import serving_process
from tests.support.waiting import until

COMMAND = (sys.executable, "-m", "flotilla_environments.serve", "--port", "0")
CONFIG = McpServer(command=COMMAND, instances=True)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server that the tests of this file share."""
    command = environment_command("-m", "flotilla_environments.serve", "--port", "0")
    with serving_process(command) as url:
        yield url


@asynccontextmanager
async def closing(backend: McpBackend) -> AsyncGenerator[McpBackend]:
    try:
        yield backend
    finally:
        await backend.close()


def backend_at(url: str) -> AbstractAsyncContextManager[McpBackend]:
    http = open_http_session(max_connections=64, headers={})
    return closing(McpBackend(CONFIG, FixedAddress(url), http))


@pytest.mark.parametrize(
    ("description", "missing"),
    [
        ({"instance_id": "i-1"}, "urls.root"),
        ({"instance_id": "i-1", "urls": ["http://x/"]}, "urls.root"),
        ({"urls": {"root": "http://x/"}}, "instance_id"),
    ],
)
async def test_an_instance_that_is_described_without_its_address_is_told_by_a_sentence(
    description: dict[str, object], missing: str
) -> None:
    answer = 200, {"content-type": "application/json"}, json.dumps(description).encode()
    request = ProvisionRequest("e1", parse_task(json.dumps(make_task("booking", "train", 0))), 60.0)
    with serve_answers(lambda _: answer) as url:
        async with backend_at(url) as backend:
            with pytest.raises(BackendError, match=f"described without {missing}") as caught:
                await backend.provision_instance(request, timeout_s=10.0)
    assert caught.value.delivered is None, "it may exist"


@asynccontextmanager
async def gateway_over(backend: McpBackend) -> AsyncGenerator[Gateway]:
    config = EnvGatewayConfig.model_validate(
        {"backend": "mcp", "servers": [CONFIG.model_dump()], "open_timeout_s": 30.0}
    )
    async with grading_gateway({"mcp": backend}, config) as gateway:
        yield gateway


async def instances(backend: McpBackend, url: str) -> set[str]:
    listed = f"{url}/v1/env/instances?status=running"
    return {body["run_id"] for body in await backend.send_request("GET", listed, timeout_s=5.0)}


def provision(episode_id: str) -> ProvisionRequest:
    task = parse_task(json.dumps(make_task("booking", "train", 0)))
    return ProvisionRequest(episode_id, task, ttl_s=60.0)


async def test_a_server_that_dies_loses_its_episodes_and_new_ones_open() -> None:
    address = SupervisedServer(COMMAND, start_timeout_s=30.0)
    backend = McpBackend(CONFIG, address, open_http_session(max_connections=4, headers={}))
    async with closing(backend), gateway_over(backend) as gateway:
        task = json.dumps(make_task("booking", "train", 0))
        session = await opened(gateway, open_spec(0, task=task))
        assert address.pid is not None
        os.killpg(address.pid, signal.SIGKILL)
        await until(lambda: address.generation == 1)
        answer, _ = await gateway.call_tool(session, 0, next(iter(session.tools)), "{}", 5.0)
        assert answer.outcome is ToolOutcome.SESSION_LOST
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert grade.reason is NoGradeReason.INSTANCE_LOST
        await opened(gateway, open_spec(1, task=task))


async def test_a_full_server_is_a_queue() -> None:
    address = SupervisedServer((*COMMAND, "--max-instances", "1"), start_timeout_s=30.0)
    backend = McpBackend(CONFIG, address, open_http_session(max_connections=4, headers={}))
    async with closing(backend), gateway_over(backend) as gateway:
        task = json.dumps(make_task("booking", "train", 0))
        first = await opened(gateway, open_spec(0, task=task))
        second = asyncio.create_task(opened(gateway, open_spec(1, task=task)))
        await asyncio.sleep(0.3)
        assert not second.done()
        gateway.close(first.episode.episode_id)
        assert (await second).failure is None


async def test_whether_an_instance_runs_is_queried_at_the_control_plane(server: str) -> None:
    async with backend_at(server) as backend:
        request = provision(f"run.gw.{os.urandom(4).hex()}")
        instance = await backend.provision_instance(request, timeout_s=30.0)
        assert await instance.is_alive(timeout_s=5.0)
        await instance.close(timeout_s=5.0)
        assert not await instance.is_alive(timeout_s=5.0)


async def test_a_command_that_does_not_serve_is_not_waited_for_for_ever() -> None:
    address = SupervisedServer((sys.executable, "-c", "print('hi')"), start_timeout_s=5.0)
    try:
        with pytest.raises(BackendError, match=r"does not serve: the command ended .*code 0"):
            await address.wait_for_url(20.0)
    finally:
        await address.close()
