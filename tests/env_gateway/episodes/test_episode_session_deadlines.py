"""Callers that leave before an environment has had its usual time: no other pays for them."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.adapters.backend_factory import build_backend
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.limits.circuit_breaker import BreakerState
from flotilla_env_gateway.ports import CallAnswer, Text
from tests.env_gateway.adapters.mcp.test_session import INITIALIZE_RESULT
from tests.env_gateway.episodes.napping_server import TOOL
from tests.support.fake_gateway import open_spec, opened
from tests.support.grading_gateway import grading_gateway
from tests.support.http_server import serving_app

COMMAND = (sys.executable, str(Path(__file__).with_name("napping_server.py")))
DAY_S = 86400.0
# On a busy machine a caller's time may be over before the call was sent.
UNANSWERED = {ToolOutcome.OUTCOME_UNKNOWN, ToolOutcome.DEADLINE, ToolOutcome.SESSION_LOST}


@asynccontextmanager
async def gateway_over(mcp: dict[str, Any], **section: Any) -> AsyncGenerator[Gateway]:
    config = EnvGatewayConfig.model_validate(
        {"backend": "mcp", "servers": [mcp], "close_timeout_s": 2.0, **section}
    )
    backend = build_backend("mcp", config)
    try:
        async with grading_gateway({"mcp": backend}, config) as gateway:
            yield gateway
    finally:
        await backend.close()


@asynccontextmanager
async def shared_server() -> AsyncGenerator[str]:
    """One MCP server for all episodes; `nap` answers after as many seconds as its argument."""

    async def post(request: web.Request) -> web.Response:
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        result: dict[str, Any] = INITIALIZE_RESULT
        if message["method"] == "tools/list":
            result = {"tools": [TOOL]}
        elif message["method"] == "tools/call":
            await asyncio.sleep(message["params"]["arguments"]["seconds"])
            result = {"content": [{"type": "text", "text": "awake"}]}
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})

    app = web.Application()
    app.router.add_post("/mcp", post)
    async with serving_app(app) as url:
        yield f"{url}/mcp"


async def episodes(gateway: Gateway, count: int, **spec: Any) -> list[Session]:
    specs = (open_spec(index, **spec) for index in range(count))
    return await asyncio.gather(*(opened(gateway, one) for one in specs))


async def nap(gateway: Gateway, session: Session, seconds: float, timeout_s: float) -> CallAnswer:
    arguments = json.dumps({"seconds": seconds})
    seq = session.episode.next_seq
    return (await gateway.call_tool(session, seq, "nap", arguments, timeout_s))[0]


async def process_of(gateway: Gateway, session: Session) -> int:
    (part,) = (await nap(gateway, session, 0.0, 10.0)).parts
    assert isinstance(part, Text)
    return int(part.text)


async def hurried(
    gateway: Gateway, sessions: list[Session], calls: int, timeout_s: float
) -> set[ToolOutcome]:
    """Call a tool that takes a day, by callers that wait no longer than given."""
    left = list(range(calls))
    outcomes: set[ToolOutcome] = set()

    async def call(session: Session) -> None:
        while left:
            left.pop()
            outcomes.add((await nap(gateway, session, DAY_S, timeout_s)).outcome)

    await asyncio.gather(*map(call, sessions))
    return outcomes


def pressure(gateway: Gateway) -> tuple[int, BreakerState]:
    gate = gateway.caller.gates.call_gate("fake")
    return gate.limit, gate.breaker_state


async def test_forty_calls_with_short_deadlines_cost_no_other_caller() -> None:
    async with shared_server() as url, gateway_over({"url": url}) as gateway:
        sessions = await episodes(gateway, 16)
        (other,) = await episodes(gateway, 1, run_id="other", request_id="other")
        await asyncio.gather(*(nap(gateway, session, 0.0, 10.0) for session in sessions))
        before = pressure(gateway)
        assert await hurried(gateway, sessions, 40, 0.1) <= UNANSWERED
        assert pressure(gateway) == before
        answer = await nap(gateway, other, 0.0, 10.0)
        assert (answer.outcome, answer.queue_s < 3.0) == (ToolOutcome.OK, True)


async def test_a_server_that_is_silent_for_longer_than_usual_is_left_alone() -> None:
    # On a busy machine even quick answers take so long that four times as much is no test.
    section: dict[str, Any] = {"breaker": {"patience_s": 0.1}, "call_timeout_s": 1.0}
    async with shared_server() as url, gateway_over({"url": url}, **section) as gateway:
        sessions = await episodes(gateway, 16)
        await asyncio.gather(*(nap(gateway, session, 0.0, 10.0) for session in sessions))
        before, _ = pressure(gateway)
        assert ToolOutcome.SESSION_LOST in await hurried(gateway, sessions, 40, 1.0)
        limit, state = pressure(gateway)
        assert (limit < before, state) == (True, BreakerState.OPEN)


async def test_an_instance_that_hangs_does_not_close_the_door_to_the_others() -> None:
    stdio = {"transport": "stdio", "command": COMMAND}
    breaker = {"patience_s": 0.05, "window": 6}
    async with gateway_over(stdio, breaker=breaker) as gateway:
        hung, other = await episodes(gateway, 2)
        process = await process_of(gateway, hung)
        for _ in range(6):
            await nap(gateway, other, 0.0, 10.0)
        before = pressure(gateway)
        os.kill(process, signal.SIGSTOP)
        assert await hurried(gateway, [hung], 8, 0.2) <= UNANSWERED
        os.kill(process, signal.SIGCONT)
        assert pressure(gateway) == before
        answer = await nap(gateway, other, 0.0, 10.0)
        assert (answer.outcome, answer.queue_s < 3.0) == (ToolOutcome.OK, True)
