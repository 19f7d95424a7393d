"""Servers that do not come up: a waiting client learns why, in their own words, as it waits."""

import sys

import pytest

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.http_client import exchange_json, open_http_session
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.adapters.supervised_server import SupervisedServer
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.ports import BackendError, ProvisionRequest
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, running, task_json

# A server of mcp 1.x, under the mcp 2.x that is installed here.
OLD_SERVER = "from mcp.server.fastmcp import FastMCP"
ENDED = r"it ended with code 1 and wrote: ModuleNotFoundError: .* This is mcp 2"
AWAY = BackendError("connect", "http://127.0.0.1:9/mcp cannot be reached", delivered=False)


async def test_a_stdio_server_that_ends_is_reported_with_its_last_words() -> None:
    config = McpServer(transport="stdio", command=(sys.executable, "-c", OLD_SERVER))
    backend = McpStdioBackend(config)
    request = ProvisionRequest("e1", parse_task(task_json()), 60.0)
    instance = await backend.provision_instance(request, timeout_s=20.0)
    try:
        with pytest.raises(BackendError, match=ENDED) as it:
            await instance.list_tools(timeout_s=20.0)
        assert it.value.lost, "another attempt at this process is of no use"
    finally:
        await backend.close()


async def test_a_supervised_server_that_ends_is_reported_with_its_last_words() -> None:
    address = SupervisedServer((sys.executable, "-c", OLD_SERVER), start_timeout_s=60.0)
    try:
        with pytest.raises(BackendError, match=ENDED):
            await address.wait_for_url(60.0)
    finally:
        await address.close()


async def test_where_nothing_listens_the_address_and_the_cause_are_reported() -> None:
    async with open_http_session(max_connections=1, headers={}) as http:
        with pytest.raises(BackendError, match=r"http://127\.0\.0\.1:9/mcp .* Connection refused"):
            await exchange_json(http, "GET", "http://127.0.0.1:9/mcp", timeout_s=5.0)


async def test_trouble_is_reported_while_an_episode_opens_and_forgotten_once_it_has() -> None:
    backend = ScriptedBackend()
    backend.fail_at("provision", AWAY, BackendError("throttled", "too many", delivered=False), AWAY)
    async with running(backend) as gateway:
        session = gateway.open_episode(open_spec())
        gateway.join_opening(session)
        reported = [(state, session.trouble) async for state in session.follow_states()]
    assert (EpisodeState.PROVISIONING, str(AWAY)) in reported
    assert all("too many" not in trouble for _, trouble in reported), (
        "to wait in a queue is no trouble"
    )
    assert reported[-1] == (EpisodeState.READY, "")


@pytest.mark.parametrize(("delivered", "deleted"), [(False, 0), (None, 1)])
async def test_what_was_certainly_never_created_is_not_deleted(
    delivered: bool | None, deleted: int
) -> None:
    backend = ScriptedBackend()
    backend.fail_at("provision", BackendError("x", "no", delivered=delivered, invalid=True))
    async with running(backend) as gateway:
        session = gateway.open_episode(open_spec())
        gateway.join_opening(session)
        assert [state async for state in session.follow_states()][-1] is EpisodeState.FAILED
        gateway.leave_opening(session)
        await gateway.drain(1.0)
        assert backend.steps["close"] == deleted
        assert gateway.opener.created == gateway.closer.closed == 1


async def test_an_episode_that_is_given_up_is_not_waited_for_between_two_attempts() -> None:
    backend = ScriptedBackend()
    later = BackendError("http", "HTTP 503", delivered=False, retry_after_s=30.0)
    backend.fail_at("provision", later)
    async with running(backend) as gateway:
        session = gateway.open_episode(open_spec())
        gateway.join_opening(session)
        async for _ in session.follow_states():
            if session.trouble:
                break
        gateway.leave_opening(session)
        await gateway.drain(5.0)
        assert gateway.opener.created == gateway.closer.closed == 1
