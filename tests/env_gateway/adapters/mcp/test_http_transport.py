"""Streamable HTTP, and HTTP+SSE, with servers that use what the specification allows them."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.mcp.http_transport import HttpTransport, SseTransport
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.ports import BackendError, Text
from tests.env_gateway.adapters.mcp.test_session import INITIALIZE_RESULT, answer
from tests.support.http_server import serving_app

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def session_at(
    path: str, handle: Handler, *, route: str | None = None
) -> AsyncGenerator[McpSession]:
    """A session with the server that handles all requests at `path`."""
    app = web.Application()
    app.router.add_route("*", route or path.partition("?")[0], handle)
    async with (
        serving_app(app) as url,
        open_http_session(max_connections=4, headers={"x-key": "k"}) as http,
        open_http_session(max_connections=0, headers={}) as listening,
    ):
        session = McpSession(lambda: HttpTransport(http, f"{url}{path}", listening=listening))
        yield session
        await session.close(5.0)


def result_of(message: dict[str, Any]) -> dict[str, Any]:
    result = {"content": [{"type": "text", "text": message["method"]}]}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def reply(message: dict[str, Any]) -> web.Response:
    if message["method"] == "initialize":
        return answer(message, INITIALIZE_RESULT, headers={"mcp-session-id": "s1"})
    return web.json_response(result_of(message))


@asynccontextmanager
async def event_stream(request: web.Request) -> AsyncGenerator[Callable[..., Awaitable[None]]]:
    """Answer with a stream; what is yielded writes an event to it."""
    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await stream.prepare(request)

    async def write(message: object = None, **fields: object) -> None:
        lines = [f"{name}: {value}" for name, value in fields.items()]
        lines.append(f"data: {json.dumps(message)}" if message is not None else "data:")
        await stream.write(("\n".join(lines) + "\n\n").encode())

    yield write
    await stream.write_eof()


@pytest.mark.parametrize("path", ["/", "/mcp/", "/mcp/v1", "/owner/repo", "/mcp?key=a%2Fbc&x=[1]"])
async def test_the_url_is_asked_as_written(path: str) -> None:
    asked: set[str] = set()

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.add(request.raw_path)
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        return reply(message) if "id" in message else web.Response(status=202)

    async with session_at(path, handle) as session:
        assert not (await session.call_tool("t", {}, 5.0)).is_error
    assert asked == {path}


async def test_a_refusal_names_the_url_without_its_key() -> None:
    async with open_http_session(max_connections=1, headers={}) as http:
        url = "http://127.0.0.1:9/mcp/v1?key=secret"
        with pytest.raises(BackendError, match=r"http://127\.0\.0\.1:9/mcp/v1\?\.\.\. cannot be"):
            await McpSession(lambda: HttpTransport(http, url)).open_session(5.0)


async def test_where_there_are_no_sessions_no_request_waits_for_initialized() -> None:
    listed, initialized = asyncio.Event(), asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        message = await request.json()
        if message["method"] == "initialize":
            return answer(message, INITIALIZE_RESULT)
        if message["method"] == "tools/list":
            listed.set()
            return answer(message, {"tools": []})
        await listed.wait()
        initialized.set()
        return web.Response(status=202)

    app = web.Application()
    app.router.add_post("/mcp", handle)
    async with (
        serving_app(app) as url,
        open_http_session(max_connections=4, headers={}) as http,
    ):
        session = McpSession(lambda: HttpTransport(http, f"{url}/mcp"), stateless=True)
        assert await session.list_tools(10.0) == []
        async with asyncio.timeout(10.0):
            await initialized.wait()
        await session.close()


@pytest.mark.parametrize("of_initialized", ["accepted", "empty stream", "json"])
async def test_events_without_data_and_every_answer_to_a_notification_are_accepted(
    of_initialized: str,
) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if message["method"] == "initialize":
            return reply(message)
        if "id" not in message:
            return {
                "accepted": web.Response(status=202, text="Accepted"),
                "empty stream": web.Response(content_type="text/event-stream"),
                "json": web.json_response(None),
            }[of_initialized]
        async with event_stream(request) as write:
            await write(id=1)
            await write(result_of(message), id=2)
        return web.Response()

    async with session_at("/mcp", handle) as session:
        assert (await session.call_tool("t", {}, 5.0)).parts == (Text("tools/call"),)


async def test_a_stream_that_ends_before_the_answer_is_resumed_where_it_ended() -> None:
    resumed: list[str | None] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            last = request.headers.get("last-event-id")
            if last is None:
                return web.Response(status=405)
            resumed.append(last)
            async with event_stream(request) as write:
                if len(resumed) == 1:
                    await write(id="b", retry=10)
                else:
                    message = {"id": called[0], "method": "tools/call"}
                    await write(result_of(message), id="c")
            return web.Response()
        if request.method == "DELETE":
            return web.Response(status=405)
        message = await request.json()
        if message["method"] != "tools/call":
            return reply(message) if "id" in message else web.Response(status=202)
        called.append(message["id"])
        async with event_stream(request) as write:
            await write(id="a", retry=10)
        return web.Response()

    called: list[int] = []
    async with session_at("/mcp", handle) as session:
        assert (await session.call_tool("t", {}, 5.0)).parts == (Text("tools/call"),)
    assert (resumed, len(called)) == (["a", "b"], 1)


@pytest.mark.parametrize("ends", [True, False])
async def test_an_answer_on_the_servers_own_stream_ends_the_exchange(ends: bool) -> None:
    called: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    listening = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            return web.Response()
        if request.method == "GET":
            async with event_stream(request) as write:
                listening.set()
                await write(result_of(await called.get()))
                await asyncio.sleep(10.0)
            return web.Response()
        message = await request.json()
        if message["method"] != "tools/call":
            return reply(message) if "id" in message else web.Response(status=202)
        await listening.wait()
        async with event_stream(request) as write:
            await write(id="a", retry=5000)
            called.put_nowait(message)
            await asyncio.sleep(0.0 if ends else 10.0)
        return web.Response()

    async with session_at("/mcp", handle) as session:
        assert (await session.call_tool("t", {}, 4.0)).parts == (Text("tools/call"),)


ASKED = ["ping", "sampling/createMessage", "roots/list", "elicitation/create"]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("method", ASKED)
async def test_what_the_server_asks_is_answered_or_refused(method: str, outside: bool) -> None:
    """Within the answer to a call, or on the server's own stream."""
    answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    to_ask: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    listening = asyncio.Event()
    params: dict[str, Any] = {
        "sampling/createMessage": {"messages": [], "maxTokens": 1},
        "elicitation/create": {
            "message": "?",
            "requestedSchema": {"type": "object", "properties": {}},
        },
    }.get(method, {})
    question = {"jsonrpc": "2.0", "id": 77, "method": method, "params": params}

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            return web.Response()
        if request.method == "GET":
            async with event_stream(request) as write:
                listening.set()
                await write(await to_ask.get())
                await asyncio.sleep(10.0)
            return web.Response()
        message = await request.json()
        if message.get("id") == 77:
            answers.put_nowait(message)
            return web.Response(status=202)
        if message.get("method") != "tools/call":
            return reply(message) if "id" in message else web.Response(status=202)
        async with event_stream(request) as write:
            if outside:
                await listening.wait()
                to_ask.put_nowait(question)
            else:
                await write(question)
            told = await answers.get()
            text = json.dumps(told.get("result", told.get("error", {}).get("code")))
            result = {"content": [{"type": "text", "text": text}]}
            await write({"jsonrpc": "2.0", "id": message["id"], "result": result})
        return web.Response()

    async with session_at("/mcp", handle) as session:
        result = await session.call_tool("t", {}, 5.0)
    assert result.parts == (Text("{}" if method == "ping" else "-32601"),)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "http://[", "", None])
async def test_a_redirect_to_nowhere_is_refused_and_was_not_executed(location: str | None) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if message["method"] == "tools/call":
            headers = {} if location is None else {"location": location}
            return web.Response(status=307, headers=headers)
        return reply(message) if "id" in message else web.Response(status=202)

    async with session_at("/mcp", handle) as session:
        with pytest.raises(BackendError, match="HTTP 307 leads to") as caught:
            await session.call_tool("t", {}, 5.0)
    assert (caught.value.delivered, caught.value.invalid) == (False, True)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["initialize", "tools/call"])
async def test_a_redirect_to_another_origin_is_refused_and_its_page_not_read(
    status: int, method: str
) -> None:
    visits = 0

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        nonlocal visits
        visits += 1
        return web.json_response(result_of(await request.json()))

    other = web.Application()
    other.router.add_route("*", "/page", elsewhere)
    async with serving_app(other) as target:

        async def handle(request: web.Request) -> web.StreamResponse:
            if request.method != "POST":
                return web.Response(status=405)
            message = await request.json()
            if message["method"] == method:
                return web.Response(status=status, headers={"location": f"{target}/page"})
            return reply(message) if "id" in message else web.Response(status=202)

        async with session_at("/mcp", handle) as session:
            with pytest.raises(BackendError, match=f"HTTP {status} leads to '{target}/page'"):
                await session.call_tool("t", {}, 5.0)
    assert visits == 0


async def test_a_redirect_within_the_origin_that_keeps_the_method_is_followed() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/mcp":
            return web.Response(status=307, headers={"location": "/mcp/"})
        if request.method != "POST":
            return web.Response(status=405)
        assert request.headers["x-key"] == "k"
        message = await request.json()
        return reply(message) if "id" in message else web.Response(status=202)

    async with session_at("/mcp", handle, route="/{tail:.*}") as session:
        assert (await session.call_tool("t", {}, 5.0)).parts == (Text("tools/call"),)


async def test_a_connection_that_the_server_closes_when_idle_loses_no_call() -> None:
    """Servers close a connection that was idle for a time, here of 1 s and within 50 ms of it."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while True:
                async with asyncio.timeout(1.0):
                    head = await reader.readuntil(b"\r\n\r\n")
                lines = dict(
                    line.lower().split(": ", 1)
                    for line in head.decode().split("\r\n")
                    if ": " in line
                )
                message = json.loads(await reader.readexactly(int(lines["content-length"])))
                body = b"" if "id" not in message else json.dumps(made(message)).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    + f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
        except (TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def made(message: dict[str, Any]) -> dict[str, Any]:
        if message["method"] == "initialize":
            return {"jsonrpc": "2.0", "id": message["id"], "result": INITIALIZE_RESULT}
        return result_of(message)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]

    async def play(number: int, session: McpSession) -> None:
        for _ in range(2):
            await session.call_tool("t", {}, 5.0)
            await asyncio.sleep(0.95 + number * 0.002)

    async with server, open_http_session(max_connections=0, headers={}) as http:
        sessions = [
            McpSession(lambda: HttpTransport(http, f"http://{host}:{port}/mcp")) for _ in range(50)
        ]
        await asyncio.gather(*(play(number, one) for number, one in enumerate(sessions)))
        assert connections >= 50
        for session in sessions:
            await session.close()


async def test_a_cancelled_call_is_cancelled_at_the_server_and_alone() -> None:
    seen: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if message["method"] == "notifications/cancelled":
            seen.put_nowait(message["params"])
        if "id" not in message:
            return web.Response(status=202)
        if message.get("params", {}).get("name") == "slow":
            await asyncio.sleep(30.0)
        return reply(message)

    async with session_at("/mcp", handle) as session:
        await session.open_session(5.0)
        started = time.monotonic()
        with pytest.raises(BackendError, match=r"no answer to tools/call within 0\.5 s"):
            await session.call_tool("slow", {}, 0.5)
        assert time.monotonic() - started < 1.2
        assert (await asyncio.wait_for(seen.get(), 5.0))["requestId"] == 2
        slow = asyncio.create_task(session.call_tool("slow", {}, 20.0))
        quick = [session.call_tool("quick", {}, 5.0) for _ in range(3)]
        await asyncio.sleep(0.1)
        slow.cancel()
        assert not any(result.is_error for result in await asyncio.gather(*quick))
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await asyncio.wait_for(seen.get(), 5.0))["requestId"] == 3


@pytest.mark.parametrize("offered", [True, False])
async def test_a_stream_is_kept_open_only_if_the_server_offers_one(offered: bool) -> None:
    asked = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        if request.method == "GET":
            asked += 1
            if not offered:
                return web.Response(status=405)
            async with event_stream(request):
                await asyncio.sleep(10.0)
        if request.method != "POST":
            return web.Response()
        message = await request.json()
        return reply(message) if "id" in message else web.Response(status=202)

    app = web.Application()
    app.router.add_route("*", "/mcp", handle)
    refusing: set[str] = set()
    async with (
        serving_app(app) as url,
        open_http_session(max_connections=4, headers={}) as http,
        open_http_session(max_connections=0, headers={}) as listening,
    ):
        for _ in range(3):
            session = McpSession(
                lambda: HttpTransport(http, f"{url}/mcp", listening=listening, refusing=refusing)
            )
            await session.open_session(5.0)
            await asyncio.sleep(0.1)
            await session.close(5.0)
    assert asked == (3 if offered else 1)


@asynccontextmanager
async def older_session(endpoint: str = "/messages?session=1") -> AsyncGenerator[McpSession]:
    """A session over HTTP+SSE with a server whose tool `end` ends the stream."""
    outgoing: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def listen(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(f"event: endpoint\ndata: {endpoint}\n\n".encode())
        while (message := await outgoing.get()) is not None:
            await stream.write(f"event: message\ndata: {json.dumps(message)}\n\n".encode())
        return stream

    async def post(request: web.Request) -> web.StreamResponse:
        assert request.query["session"] == "1"
        message = await request.json()
        if message["method"] == "initialize":
            found = {"jsonrpc": "2.0", "id": message["id"], "result": INITIALIZE_RESULT}
            outgoing.put_nowait(found)
        elif message.get("params", {}).get("name") == "end":
            outgoing.put_nowait(None)
        elif "id" in message:
            outgoing.put_nowait(result_of(message))
        return web.Response(status=202, text="Accepted")

    app = web.Application()
    app.router.add_get("/sse", listen)
    app.router.add_post("/messages", post)
    async with (
        serving_app(app) as url,
        open_http_session(max_connections=4, headers={}) as http,
        open_http_session(max_connections=0, headers={}) as listening,
    ):
        session = McpSession(lambda: SseTransport(http, listening, f"{url}/sse"))
        yield session
        await session.close()


async def test_a_server_of_the_older_transport_is_spoken_to() -> None:
    async with older_session() as session:
        results = await asyncio.gather(*(session.call_tool("t", {}, 5.0) for _ in range(5)))
        assert all(result.parts == (Text("tools/call"),) for result in results)
        assert await session.is_alive(5.0)
        with pytest.raises(BackendError) as caught:
            await session.call_tool("end", {}, 5.0)
        assert (caught.value.lost, caught.value.delivered) == (True, None)
        assert not await session.is_alive(5.0)


async def test_its_messages_go_to_no_other_origin() -> None:
    async with older_session("http://127.0.0.2:1/messages") as session:
        with pytest.raises(BackendError, match="is of another origin"):
            await session.open_session(5.0)


async def test_a_server_of_the_older_transport_is_named_as_such() -> None:
    async def listen(request: web.Request) -> web.StreamResponse:
        if request.method != "GET":
            return web.Response(status=405)
        async with event_stream(request) as write:
            await write("/messages", event="endpoint")
        return web.Response()

    async with session_at("/sse", listen) as session:
        with pytest.raises(BackendError, match=r'HTTP 405.*set transport = "sse"'):
            await session.open_session(5.0)
