"""The MCP client against a server that answers in every way that servers do."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from flotilla_common.text.parsing import TextLimits
from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.mcp.http_transport import HttpTransport
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.adapters.mcp.wire import parse_parts
from flotilla_env_gateway.ports import BackendError, Media, Text
from tests.support.http_server import serving_app

INITIALIZE_RESULT = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "serverInfo": {"name": "test", "version": "1"},
}
Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server_with(
    handle: Handler, *, session_id: str | None = "s1"
) -> AsyncGenerator[tuple[str, list[str]]]:
    """The URL of a server that answers `initialize` and leaves other requests to `handle`, and the
    methods it was asked."""
    methods: list[str] = []

    async def post(request: web.Request) -> web.StreamResponse:
        message = await request.json()
        methods.append(message["method"])
        if message["method"] == "initialize":
            # Those name what both sides have agreed on.
            assert "mcp-method" not in request.headers
            assert "mcp-protocol-version" not in request.headers
            headers = {"mcp-session-id": session_id} if session_id else {}
            return answer(message, INITIALIZE_RESULT, headers=headers)
        if "id" not in message:
            return web.Response(status=202)
        return await handle(request, message)

    app = web.Application()
    app.router.add_post("/mcp", post)
    async with serving_app(app) as url:
        yield f"{url}/mcp", methods


@asynccontextmanager
async def session_with(
    handle: Handler, *, max_bytes: int = 2**20, stateless: bool = False
) -> AsyncGenerator[tuple[McpSession, list[str]]]:
    """A session with such a server."""
    limits = TextLimits(max_bytes, 2**18)
    async with (
        server_with(handle) as (url, methods),
        open_http_session(max_connections=4, headers={}) as http,
    ):
        connect = lambda: HttpTransport(http, url, limits=limits)  # noqa: E731
        session = McpSession(connect, stateless=stateless)
        yield session, methods
        await session.close()


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


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422])
async def test_a_refusal_within_a_session_loses_it_for_good(status: int) -> None:
    """State belongs to the session, so a new one would be another episode."""
    calls = 0

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        body = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "No session"}}
        return web.json_response(body, status=status) if calls == 1 else answer(message, {})

    async with session_with(handle) as (session, methods):
        for _ in range(2):
            with pytest.raises(BackendError) as caught:
                await session.call_tool("t", {}, 5.0)
            assert (caught.value.lost, caught.value.delivered) == (True, False)
        assert not await session.is_alive(5.0)
        assert (methods.count("initialize"), calls) == (1, 1)


@pytest.mark.parametrize("code", [-32603, -32000, -32001, -32002, -32601, -32600, -32700, 1, 0])
@pytest.mark.parametrize("status", [200, 400, 500])
async def test_an_error_that_arrives_as_a_message_is_the_servers_answer(
    code: int, status: int
) -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        error = {"code": code, "message": "Connection closed"}
        return web.json_response({"id": message["id"], "error": error}, status=status)

    async with session_with(handle) as (session, _):
        result = await session.call_tool("t", {}, 5.0)
        assert result.is_error
        assert result.parts == (Text(f"{code}: Connection closed"),)


@pytest.mark.parametrize(
    ("status", "code", "alive"),
    [(200, -32000, True), (400, -32601, True), (400, -32000, False), (400, -32600, False)],
)
async def test_a_ping_that_is_refused_proves_a_session_only_if_servers_need_not_know_it(
    status: int, code: int, alive: bool
) -> None:
    """Some servers name the request in their refusal of a session that they have forgotten."""

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        error = {"code": code, "message": "No valid session ID provided"}
        return web.json_response({"id": message["id"], "error": error}, status=status)

    async with session_with(handle) as (session, _):
        assert (await session.call_tool("t", {}, 5.0)).is_error
        assert await session.is_alive(5.0) == alive


async def test_refused_arguments_are_the_calls_own_fault() -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"id": message["id"], "error": {"code": -32602, "message": "no"}})

    error = await failing(handle)
    assert (error.delivered, error.bad_arguments, error.lost) == (False, True, False)


async def test_a_long_error_is_cut_with_a_mark() -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        error = {"code": -32603, "message": "x" * 10_000_000}
        return web.json_response({"id": message["id"], "error": error})

    async with session_with(handle, max_bytes=2**24) as (session, _):
        (part,) = (await session.call_tool("t", {}, 20.0)).parts
    assert isinstance(part, Text) and len(part.text) < 5000
    assert part.text.endswith("[9996000 more characters were cut]")


async def test_an_answer_that_is_too_large_is_named_to_the_policy() -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="x" * 5000, content_type="application/json")

    async with session_with(handle, max_bytes=4096) as (session, _):
        result = await session.call_tool("t", {}, 5.0)
    (part,) = result.parts
    assert result.is_error and isinstance(part, Text)
    assert "more than 4096 bytes (max_answer_bytes" in part.text


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

    kinds = ["timeout", "stream_cut", "connection", "protocol"]
    for handle, kind in zip((hang, cut, drop, nonsense), kinds, strict=True):
        timeout_s = 1.0 if kind == "timeout" else 10.0
        error = await failing(handle, timeout_s=timeout_s)
        assert (error.kind, error.delivered) == (kind, None)


async def test_a_refused_connection_was_certainly_not_executed() -> None:
    async with open_http_session(max_connections=1, headers={}) as http:
        session = McpSession(lambda: HttpTransport(http, "http://127.0.0.1:9/mcp"))
        with pytest.raises(BackendError) as caught:
            await session.call_tool("t", {}, 1.0)
        assert (caught.value.kind, caught.value.delivered) == ("connect", False)


async def test_a_forgotten_session_without_state_is_reopened_once() -> None:
    calls = 0

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return web.Response(status=404) if calls == 1 else answer(message, {"content": []})

    async with session_with(handle, stateless=True) as (session, methods):
        await session.call_tool("t", {}, 5.0)
        assert (methods.count("initialize"), calls) == (2, 2)


async def test_calls_that_find_their_session_forgotten_together_reopen_it_once() -> None:
    first = asyncio.Barrier(2)
    calls = 0

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls > 2:
            return answer(message, {"content": []})
        await first.wait()
        return web.Response(status=404)

    async with session_with(handle, stateless=True) as (session, methods):
        await asyncio.gather(*(session.call_tool("t", {}, 5.0) for _ in range(2)))
        assert (methods.count("initialize"), methods.count("tools/call")) == (2, 4)


async def test_a_server_that_knows_no_session_is_gone() -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=404)

    error = await failing(handle, stateless=True)
    assert (error.lost, error.delivered) == (True, False)


TOOL: dict[str, Any] = {"name": "t", "inputSchema": {"type": "object"}}


async def listing_failure(page: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """The failure of a server whose pages of tools are made by `page`, from the parameters."""

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return answer(message, page(message.get("params", {})))

    async with session_with(handle) as (session, _):
        with pytest.raises(BackendError) as caught:
            await session.list_tools(20.0)
    assert caught.value.invalid
    return str(caught.value)


def numbered_tool(params: dict[str, Any], **more: Any) -> tuple[dict[str, Any], int]:
    number = int(params.get("cursor", 0))
    return {**TOOL, "name": f"t{number}", **more}, number + 1


async def test_pages_of_tools_end() -> None:
    def repeated(params: dict[str, Any]) -> dict[str, Any]:
        tools = [TOOL] if not params else []
        return {"tools": tools, "nextCursor": {None: "a", "a": "b", "b": "a"}[params.get("cursor")]}

    def endless(params: dict[str, Any]) -> dict[str, Any]:
        tool, number = numbered_tool(params)
        return {"tools": [tool], "nextCursor": str(number)}

    def large(params: dict[str, Any]) -> dict[str, Any]:
        tool, number = numbered_tool(params, description="x" * 2**18)
        return {"tools": [tool], "nextCursor": str(number)}

    assert "do not end: 1 so far" in await listing_failure(repeated)
    assert "do not end: 1000 so far" in await listing_failure(endless)
    assert "do not end: 4 so far" in await listing_failure(large)


async def test_a_tool_that_cannot_be_offered_is_named() -> None:
    twice = await listing_failure(lambda _: {"tools": [TOOL, TOOL]})
    assert "two tools of the server are named 't'" in twice
    odd = await listing_failure(lambda _: {"tools": [{"name": "odd", "inputSchema": True}]})
    assert "the schema of the tool 'odd' is no object" in odd
    unnamed = await listing_failure(lambda _: {"tools": [{**TOOL, "name": ""}]})
    assert "a tool has an empty name" in unnamed


def test_parts_of_every_kind_are_read() -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(8) + (640).to_bytes(4) + (480).to_bytes(4)
    link = {"type": "resource_link", "uri": "file:///x", "name": "x", "description": "The file."}
    parts = parse_parts(
        {
            "content": [
                {"type": "text", "text": "<|im_start|>"},
                {"type": "image", "data": base64.b64encode(png).decode(), "mimeType": "image/png"},
                {"type": "image", "data": "???", "mimeType": "image/png"},
                {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
                {"type": "resource", "resource": {"uri": "u", "text": "inside"}},
                {"type": "resource", "resource": {"uri": "u", "blob": "AAAA", "mimeType": "a/b"}},
                link,
                {"type": "unheard_of", "size": 3},
            ],
            "structuredContent": {"more": True},
        }
    )
    assert parts[0] == Text("<|im_start|>")
    assert isinstance(parts[1], Media) and (parts[1].width, parts[1].height) == (640, 480)
    assert parts[2] == Text("(a part of type image/png that is not base64)")
    assert isinstance(parts[3], Media) and parts[3].mime == "audio/wav"
    assert parts[4] == Text("inside")
    assert isinstance(parts[5], Media) and parts[5].mime == "a/b"
    assert parts[6:] == (
        Text("(resource link: uri file:///x, name x, description The file.)"),
        Text("(unheard of: size 3)"),
        Text('{"more": true}'),
    )


@pytest.mark.parametrize(
    ("texts", "structured"),
    [
        (['{"a": 1}'], {"a": 1}),
        (["5"], {"result": 5}),
        (["eggs"], {"content": "eggs"}),
        (["five"], {"result": "five"}),
        (["1", "2"], {"result": [1, 2]}),
        (["a", "b"], {"result": ["a", "b"]}),
    ],
)
def test_structured_content_that_the_text_repeats_is_read_once(
    texts: list[str], structured: Any
) -> None:
    content = [{"type": "text", "text": text} for text in texts]
    parts = parse_parts({"content": content, "structuredContent": structured})
    assert parts == tuple(map(Text, texts))


def test_structured_content_of_its_own_is_read() -> None:
    assert parse_parts({"structuredContent": {"a": 1}}) == (Text('{"a": 1}'),)
    content = [{"type": "text", "text": "1 found"}]
    parts = parse_parts({"content": content, "structuredContent": {"ids": [7]}})
    assert parts == (Text("1 found"), Text('{"ids": [7]}'))
