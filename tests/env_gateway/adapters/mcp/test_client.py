"""The MCP client against a server that answers in every way that servers do."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from services.common.parsing import TextLimits
from services.env_gateway.adapters.http_client import open_http_session
from services.env_gateway.adapters.mcp.client import McpSession
from services.env_gateway.adapters.mcp.wire import parse_parts
from services.env_gateway.ports import BackendError, Media, Text
from tests.support.http_server import serving_app

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def session_with(
    handle: Handler, *, session_id: str | None = "s1", max_bytes: int = 2**20
) -> AsyncGenerator[tuple[McpSession, list[str]]]:
    """A session with a server that answers `initialize` and leaves the rest to `handle`."""
    methods: list[str] = []

    async def post(request: web.Request) -> web.StreamResponse:
        message = await request.json()
        methods.append(message["method"])
        if message["method"] == "initialize":
            headers = {"mcp-session-id": session_id} if session_id else {}
            return answer(message, {"protocolVersion": "2025-06-18"}, headers=headers)
        if "id" not in message:
            return web.Response(status=202)
        return await handle(request, message)

    app = web.Application()
    app.router.add_post("/mcp", post)
    async with serving_app(app) as url, open_http_session(max_connections=4, headers={}) as http:
        yield McpSession(http, f"{url}/mcp", limits=TextLimits(max_bytes, 2**18)), methods


def answer(message: dict[str, Any], result: Any, **more: Any) -> web.Response:
    return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result}, **more)


def sse(*events: Any, newline: str = "\n") -> web.Response:
    lines = [f"event: message{newline}data: {json.dumps(e)}{newline}{newline}" for e in events]
    return web.Response(text="".join(lines), content_type="text/event-stream")


async def failing(handle: Handler, *, timeout_s: float = 10.0, **more: Any) -> BackendError:
    async with session_with(handle, **more) as (session, _):
        with pytest.raises(BackendError) as caught:
            await session.call_tool("t", {}, timeout_s)
        return caught.value


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
async def test_an_answer_is_found_among_the_events_of_a_stream(newline: str) -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        result = {"content": [{"type": "text", "text": "done"}]}
        return sse(
            {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}},
            {"jsonrpc": "2.0", "id": 999, "result": {}},
            {"jsonrpc": "2.0", "id": message["id"], "result": result},
            newline=newline,
        )

    async with session_with(handle) as (session, methods):
        result = await session.call_tool("t", {}, 5.0)
        assert result.parts == (Text("done"),)
        assert methods == ["initialize", "notifications/initialized", "tools/call"]


@pytest.mark.parametrize(
    ("status", "kind", "delivered"),
    [
        (429, "throttled", False),
        (503, "http", False),
        (401, "auth", False),
        (413, "too_large", False),
        (500, "http", None),
        (502, "http", None),
        (504, "http", None),
    ],
)
async def test_a_status_shows_whether_the_call_may_have_run(
    status: int, kind: str, delivered: bool | None
) -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, headers={"Retry-After": "7"}, text="<html>no</html>")

    error = await failing(handle)
    assert (error.kind, error.delivered, error.retry_after_s) == (kind, delivered, 7.0)


@pytest.mark.parametrize(
    ("code", "delivered", "bad_arguments"), [(-32602, False, True), (-32000, None, False)]
)
async def test_a_json_rpc_error_shows_it_too(
    code: int, delivered: bool | None, bad_arguments: bool
) -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"id": message["id"], "error": {"code": code, "message": "no"}})

    error = await failing(handle)
    assert (error.delivered, error.bad_arguments) == (delivered, bad_arguments)


async def test_what_breaks_after_the_request_was_sent_is_unknown() -> None:
    async def hang(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(5.0)
        return web.Response()

    async def cut(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return sse({"jsonrpc": "2.0", "method": "notifications/progress"})

    async def drop(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def nonsense(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="{", content_type="application/json")

    async def huge(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="x" * 5000, content_type="application/json")

    kinds = ["timeout", "stream_cut", "connection", "protocol", "too_large"]
    for handle, kind in zip((hang, cut, drop, nonsense, huge), kinds, strict=True):
        timeout_s = 1.0 if kind == "timeout" else 10.0
        error = await failing(handle, timeout_s=timeout_s, max_bytes=4096)
        assert (error.kind, error.delivered) == (kind, None)


async def test_a_refused_connection_was_certainly_not_executed() -> None:
    async with open_http_session(max_connections=1, headers={}) as http:
        session = McpSession(http, "http://127.0.0.1:9/mcp", limits=TextLimits(4096, 2**10))
        with pytest.raises(BackendError) as caught:
            await session.call_tool("t", {}, 1.0)
        assert (caught.value.kind, caught.value.delivered) == ("connect", False)


async def test_a_forgotten_session_is_reopened_once() -> None:
    calls = 0

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return web.Response(status=404) if calls == 1 else answer(message, {"content": []})

    async with session_with(handle) as (session, methods):
        await session.call_tool("t", {}, 5.0)
        assert (methods.count("initialize"), calls) == (2, 2)


async def test_calls_that_find_their_session_forgotten_together_reopen_it_once() -> None:
    first = asyncio.Barrier(2)

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        if message["id"] > 3:
            return answer(message, {"content": []})
        await first.wait()
        return web.Response(status=404)

    async with session_with(handle) as (session, methods):
        await asyncio.gather(*(session.call_tool("t", {}, 5.0) for _ in range(2)))
        assert (methods.count("initialize"), methods.count("tools/call")) == (2, 4)


async def test_a_server_that_knows_no_session_is_gone() -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=404)

    error = await failing(handle)
    assert (error.lost, error.delivered) == (True, False)


def test_parts_of_every_kind_are_read() -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(8) + (640).to_bytes(4) + (480).to_bytes(4)
    parts = parse_parts(
        {
            "content": [
                {"type": "text", "text": "<|im_start|>"},
                {"type": "image", "data": base64.b64encode(png).decode(), "mimeType": "image/png"},
                {"type": "image", "data": "???", "mimeType": "image/png"},
                {"type": "resource", "resource": {"uri": "u", "text": "inside"}},
                {"type": "resource_link", "uri": "file:///x"},
            ],
            "structuredContent": {"ignored": True},
        }
    )
    assert parts[0] == Text("<|im_start|>")
    assert isinstance(parts[1], Media) and (parts[1].width, parts[1].height) == (640, 480)
    assert parts[2:] == (
        Text("(a part of type image/png that is not base64)"),
        Text("inside"),
        Text("file:///x"),
    )
    assert parse_parts({"structuredContent": {"a": 1}}) == (Text('{"a": 1}'),)
