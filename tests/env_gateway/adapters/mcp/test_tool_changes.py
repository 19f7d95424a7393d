"""Servers whose tools change while the gateway runs: real processes, through a gateway."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_common.rpc.free_ports import free_port
from flotilla_common.spec.config import parse_config
from flotilla_env_gateway.adapters.mcp.servers import McpServersBackend
from flotilla_env_gateway.api.alarms import GatewayAlarms
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import CallAnswer, Text
from tests.support.fake_gateway import open_spec, opened, task_json
from tests.support.grading_gateway import grading_gateway
from tests.support.waiting import until

MODULE = "tests.env_gateway.adapters.mcp.changing_server"
Event = Mapping[str, Any]


def over_stdio(name: str, *tools: str) -> dict[str, Any]:
    command = [sys.executable, "-m", MODULE, name, "stdio", *tools]
    # The module is found in the working directory.
    return {"name": name, "transport": "stdio", "command": command, "shared_state": True}


@pytest.fixture
def over_http() -> Iterator[dict[str, Any]]:
    """A server over HTTP, a process that all episodes share, with the tools `look` and `buy`."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", MODULE, "shop", str(port), "look", "buy"]) as it:
        yield {"name": "shop", "url": f"http://127.0.0.1:{port}/mcp"}
        it.terminate()


@asynccontextmanager
async def gateway_of(*servers: Mapping[str, Any]) -> AsyncGenerator[Gateway]:
    names = [server["name"] for server in servers]
    section = {"backend": "mcp", "servers": servers, "environments": {"fake": {"servers": names}}}
    config = parse_config(EnvGatewayConfig, section, where="spec")
    backend = McpServersBackend(config)
    try:
        async with grading_gateway({"mcp": backend}, config) as gateway:
            yield gateway
    finally:
        await backend.close()


async def episode(gateway: Gateway, attempt: int = 0, **task: Any) -> Session:
    text = task_json(**{"version": "v1", **task})
    return await opened(gateway, open_spec(attempt, task=text))


async def call(gateway: Gateway, session: Session, name: str, **arguments: Any) -> CallAnswer:
    seq = session.episode.next_seq
    return (await gateway.call_tool(session, seq, name, json.dumps(arguments), 10.0))[0]


async def deploy(
    gateway: Gateway, session: Session, tools: Sequence[str], *, announced: bool = False
) -> None:
    answer = await call(gateway, session, "deploy", tools=tools, announced=announced)
    assert answer.parts == (Text("deployed"),)


def named(events: Sequence[Event], name: str) -> list[Event]:
    kept = ("env", "version", "added", "removed", "changed")
    return [{k: e[k] for k in kept if k in e} for e in events if e["event"] == name]


async def test_a_change_under_one_version_is_told_and_new_episodes_get_the_new_tools(
    over_http: dict[str, Any],
) -> None:
    async with gateway_of(over_http) as gateway:
        with capture_logs() as events:
            before = await episode(gateway, 0)
            await episode(gateway, 1, key="another-task")
            assert not named(events, "tools_changed")
            await deploy(gateway, before, ["look", "sell"])
            after = [await episode(gateway, n) for n in (2, 3)]
            another = await episode(gateway, 4, key="a-third-task")
        assert {*before.tools} == {"deploy", "look", "buy"}, "it keeps its list"
        for session in (*after, another):
            assert {*session.tools} == {"deploy", "look", "sell"}
        changed = {"added": ["sell"], "removed": ["buy"], "changed": []}
        told = [{"env": "fake", "version": "v1", **changed}]
        assert named(events, "tools_changed") == told, "once, not for every episode"
        alarms = GatewayAlarms()
        assert alarms.update_alarms({}, gateway.opener.tool_watch.changes, 0.0)
    (alarm,) = alarms.raised
    assert (alarm.rule, alarm.scope) == ("tools_changed", "fake")
    assert alarm.cause == "under version 'v1' its tools changed: added sell; removed buy"


async def test_a_tool_that_vanished_in_silence_is_an_error_that_the_policy_reads(
    over_http: dict[str, Any],
) -> None:
    async with gateway_of(over_http) as gateway:
        session = await episode(gateway)
        await deploy(gateway, session, ["look"])
        answer = await call(gateway, session, "buy")
        assert answer.outcome is ToolOutcome.TOOL_ERROR
        assert "Unknown tool: buy" in str(answer.parts)
        assert (await call(gateway, session, "look")).outcome is ToolOutcome.OK
        assert not session.episode.lost


async def change_in_mid_episode(gateway: Gateway) -> tuple[Session, list[Event]]:
    """Announce a change until it has arrived: the stream of an HTTP session may still be opening,
    and nothing is kept for it."""
    with capture_logs() as events:
        session = await episode(gateway)
        offered = {*session.tools}
        await deploy(gateway, session, ["look", "sell"], announced=True)
        async with asyncio.timeout(30.0):
            while not session.vanished:
                await asyncio.sleep(0.1)
                await deploy(gateway, session, ["look", "sell"], announced=True)
    assert {*session.tools} == offered == {"deploy", "look", "buy"}
    return session, named(events, "tools_changed_in_episode")


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_in_mid_episode_a_change_is_told_and_the_episode_keeps_its_tools(
    transport: str, request: pytest.FixtureRequest
) -> None:
    stdio = over_stdio("shop", "look", "buy")
    server = stdio if transport == "stdio" else request.getfixturevalue("over_http")
    async with gateway_of(server) as gateway:
        session, told = await change_in_mid_episode(gateway)
        changed = {"added": ["sell"], "removed": ["buy"], "changed": []}
        assert told == [{"env": "fake", "version": "v1", **changed}]
        gone = await call(gateway, session, "buy")
        assert gone.outcome is ToolOutcome.TOOL_ERROR
        assert gone.parts == (Text("the environment has removed its tool 'buy'"),)
        assert (await call(gateway, session, "sell")).outcome is ToolOutcome.BAD_TOOL
        assert (await call(gateway, session, "look")).outcome is ToolOutcome.OK
        await deploy(gateway, session, ["look", "buy"], announced=True)
        await until(lambda: not session.vanished)
        assert (await call(gateway, session, "buy")).parts == (Text("shop.buy"),)
        assert not gateway.opener.tool_watch.changes, "no other episode saw it"


async def test_a_tool_of_several_servers_keeps_its_name_when_another_gets_it_too() -> None:
    store = over_stdio("store", "stock") | {"command": [sys.executable, "-c", STORE]}
    async with gateway_of(over_stdio("shop", "look", "buy"), store) as gateway:
        session = await episode(gateway)
        assert {*session.tools} == {"deploy", "look", "buy", "stock"}
        await deploy(gateway, session, ["look", "stock"], announced=True)
        await until(lambda: bool(session.vanished))
        assert session.vanished == {"buy"}
        assert (await call(gateway, session, "stock")).parts == (Text("store.stock"),)


# A server without `deploy`.
STORE = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("store")
server.add_tool(lambda: "store.stock", name="stock", description="Is stock.")
server.run("stdio")
"""
