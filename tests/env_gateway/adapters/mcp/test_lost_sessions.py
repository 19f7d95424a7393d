"""Servers that die, restart, forget sessions, refuse keys and answer errors, through a gateway: a
failure of the environment is never graded as the policy's."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_env_gateway.adapters.mcp.backend import McpBackend, build_mcp_backend
from flotilla_env_gateway.api.alarms import GatewayAlarms
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.limits.circuit_breaker import BreakerState
from flotilla_env_gateway.ports import CallAnswer, Text
from tests.env_gateway.adapters.mcp.test_session import INITIALIZE_RESULT, answer
from tests.support.fake_gateway import open_spec, opened, running

SCHEMA = {"type": "object"}


class CartServer:
    """A server over HTTP with a cart in each session. It may be stopped, and started again at its
    port; `status` refuses all requests, `error` is answered by the tool `fail`."""

    def __init__(self) -> None:
        self.carts: dict[str, list[str]] = {}
        self.status = 0
        self.error = -32603
        self.calls = 0
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/owner/repo", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{self._port}/owner/repo"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self.carts.clear()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.status:
            return web.Response(status=self.status, text="refused")
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if message["method"] == "initialize":
            session_id = uuid.uuid4().hex
            self.carts[session_id] = []
            return answer(message, INITIALIZE_RESULT, headers={"mcp-session-id": session_id})
        cart = self.carts.get(request.headers.get("mcp-session-id", ""))
        if cart is None:
            return web.Response(status=404, text="Session not found")
        if "id" not in message:
            return web.Response(status=202)
        return self._answer(message, cart)

    def _answer(self, message: dict[str, Any], cart: list[str]) -> web.Response:
        if message["method"] == "tools/list":
            tools = [{"name": name, "inputSchema": SCHEMA} for name in ("add", "fail")]
            return answer(message, {"tools": tools})
        if message["method"] == "ping":
            return answer(message, {})
        self.calls += 1
        if message["params"]["name"] == "fail":
            error = {"code": self.error, "message": "no such item"}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})
        cart.append("item")
        return answer(message, {"content": [{"type": "text", "text": f"{len(cart)} items"}]})


@asynccontextmanager
async def shopping(**config: Any) -> AsyncGenerator[tuple[CartServer, McpBackend, Gateway]]:
    server = CartServer()
    url = await server.start()
    backend = build_mcp_backend(McpServer(url=url, **config), max_calls=64)
    retry = {"base_s": 0.02, "cap_s": 0.1}
    try:
        async with running(backend, backend="mcp", servers=[{"url": url}], retry=retry) as (
            gateway
        ):
            yield server, backend, gateway
    finally:
        await backend.close()
        await server.stop()


async def call(
    gateway: Gateway, session: Session, name: str = "add", timeout_s: float = 1.0
) -> CallAnswer:
    return (await gateway.call_tool(session, session.episode.next_seq, name, "{}", timeout_s))[0]


async def check_lost(gateway: Gateway, session: Session) -> str:
    """Check that the episode has no grade; return the reason."""
    grade = await gateway.grade_episode(session, None, None, 5.0)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.INSTANCE_LOST)
    return grade.detail


@pytest.mark.parametrize("starts_again", [True, False])
async def test_a_server_that_dies_in_mid_episode_costs_the_episode(starts_again: bool) -> None:
    async with shopping() as (server, _, gateway):
        session = await opened(gateway)
        assert (await call(gateway, session)).parts == (Text("1 items"),)
        await server.stop()
        if starts_again:
            await server.start()
        assert (await call(gateway, session)).outcome is ToolOutcome.SESSION_LOST
        await check_lost(gateway, session)


async def test_a_server_that_dies_before_the_grade_costs_it() -> None:
    async with shopping() as (server, _, gateway):
        session = await opened(gateway)
        await call(gateway, session)
        await server.stop()
        await server.start()
        assert "404" in await check_lost(gateway, session)


async def test_a_session_that_the_server_forgets_is_a_lost_episode() -> None:
    async with shopping() as (server, _, gateway):
        session = await opened(gateway)
        for _ in range(2):
            await call(gateway, session)
        server.carts.clear()
        assert (await call(gateway, session)).outcome is ToolOutcome.SESSION_LOST
        assert server.calls == 2
        await check_lost(gateway, session)


async def test_a_session_that_is_forgotten_after_the_last_call_is_lost_too() -> None:
    async with shopping() as (server, _, gateway):
        session = await opened(gateway)
        await call(gateway, session)
        server.carts.clear()
        await check_lost(gateway, session)


async def test_where_sessions_have_no_state_a_new_one_takes_its_place() -> None:
    async with shopping(sessions="stateless") as (server, _, gateway):
        session = await opened(gateway)
        await call(gateway, session)
        server.carts.clear()
        assert (await call(gateway, session)).outcome is ToolOutcome.OK
        server.carts.clear()
        assert (await gateway.grade_episode(session, None, None, 5.0)).reward == 1.0


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_expires_costs_the_episode_and_raises_an_alarm(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CART_KEY", "a-key-of-the-cart")
    alarms = GatewayAlarms()
    config = {"headers": {"x-api-key": "$CART_KEY"}}
    async with shopping(**config) as (server, backend, gateway):
        session = await opened(gateway)
        assert not alarms.update_alarms({"mcp": backend}, {}, 0.0)
        server.status = status
        answer = await call(gateway, session)
        assert answer.outcome is ToolOutcome.SESSION_LOST
        assert "the variable CART_KEY" in str(answer.parts)
        await check_lost(gateway, session)
        assert alarms.update_alarms({"mcp": backend}, {}, 1.0)
    (alarm,) = alarms.raised
    assert (alarm.rule, alarm.scope) == ("refused_key", "mcp")
    assert alarm.cause == f"HTTP {status} from its server; its key is that of the variable CART_KEY"


@pytest.mark.parametrize("code", [-32603, -32000, 42])
async def test_an_answered_error_is_read_and_graded_and_no_evidence_for_the_breaker(
    code: int,
) -> None:
    async with shopping() as (server, _, gateway):
        server.error = code
        session = await opened(gateway)
        for _ in range(24):
            failed = await call(gateway, session, "fail")
            assert failed.outcome is ToolOutcome.TOOL_ERROR
            assert failed.parts == (Text(f"{code}: no such item"),)
        breaker = gateway.caller.gates.call_gate("fake").breaker_state
        assert (breaker, session.episode.tainted) == (BreakerState.CLOSED, False)
        assert (await gateway.grade_episode(session, None, None, 5.0)).reward == 1.0


async def test_each_episode_has_a_session_of_its_own() -> None:
    async with shopping() as (server, _, gateway):
        sessions = [await opened(gateway, open_spec(attempt)) for attempt in range(8)]
        answers = await asyncio.gather(*(call(gateway, session) for session in sessions))
        assert {answer.parts for answer in answers} == {(Text("1 items"),)}
        assert json.dumps(sorted(map(len, server.carts.values()))) == json.dumps([1] * 8)
