"""Requests that failed, and whether they may have been executed: over real sockets that fail on
purpose."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from flotilla_env_gateway.adapters import http_client
from flotilla_env_gateway.adapters.http_client import HttpError, exchange_json, open_http_session
from flotilla_env_gateway.adapters.mcp.http_transport import HttpTransport
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.ports import BackendError
from tests.env_gateway.adapters.mcp.test_session import INITIALIZE_RESULT, answer
from tests.support.http_server import serving_app

ENVOY = "upstream connect error or disconnect/reset before headers. reset reason: "
Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def speaking(speak: Speak) -> AsyncGenerator[str]:
    """The URL of a server that reads a request's head and then misbehaves."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await speak(reader, writer)
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*serving)


async def failure(url: str, timeout_s: float = 2.0) -> BackendError:
    async with open_http_session(max_connections=2, headers={}) as http:
        with pytest.raises(BackendError) as caught:
            await exchange_json(http, "POST", url, timeout_s=timeout_s, body={})
        return caught.value


@pytest.mark.parametrize(
    ("reason", "delivered"),
    [
        ("connection termination", None),
        ("remote reset", None),
        ("connection failure", False),
        ("remote connection failure, transport failure reason: refused", False),
        ("overflow", False),
    ],
)
def test_a_503_of_a_proxy_that_lost_a_request_it_had_sent_leaves_it_open(
    reason: str, delivered: bool | None
) -> None:
    assert HttpError(503, ENVOY + reason, None).delivered is delivered


def test_a_503_of_a_server_that_only_warms_up_is_a_refusal() -> None:
    assert (
        HttpError(503, "<html>503 Service Temporarily Unavailable</html>", None).delivered is False
    )


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7.0, 7.0),
        ("0.5", 0.5, 0.5),
        ("{in a minute}", 30.0, 60.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0, 0.0),
    ],
)
async def test_a_server_sets_the_time_of_a_retry_in_seconds_or_by_its_clock(
    header: str, least: float, most: float
) -> None:
    then = datetime.now(UTC) + timedelta(minutes=1)
    seconds = await refusal(header.replace("{in a minute}", format_datetime(then, usegmt=True)))
    assert seconds is not None and least <= seconds <= most


@pytest.mark.parametrize(
    "header", ["", "soon", "nan", "inf", "Sun, 99 Nov", "1 Oct 99999999999999999999 07:28:00"]
)
async def test_a_server_that_sets_no_time_of_a_retry_is_no_error(header: str) -> None:
    assert await refusal(header) is None


async def refusal(header: str) -> float | None:
    """Return what is understood of a Retry-After header."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 429 Too Many\r\nretry-after: {header}\r\ncontent-length: 0\r\n\r\n"
        writer.write(head.encode())

    async with speaking(speak) as url:
        error = await failure(url, timeout_s=10.0)
    assert error.kind == "throttled"
    return error.retry_after_s


async def test_an_error_that_comes_in_pieces_is_read_whole() -> None:
    body = json.dumps({"detail": {"message": "no host", "retryable": True}}).encode()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body[:9])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(body[9:])
        await writer.drain()

    async with speaking(speak) as url:
        error = await failure(url)
    assert isinstance(error, HttpError) and error.body == body.decode()


async def test_an_error_without_an_end_is_read_in_part() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 99999999\r\n\r\n")
        for _ in range(100):
            writer.write(b"x" * 1000)
        await writer.drain()

    async with speaking(speak) as url:
        error = await failure(url)
    assert isinstance(error, HttpError) and error.status == 502
    assert len(error.body) == 4000


def await_full_queue(server: socket.socket) -> None:
    """Return once a listening socket takes no further connection: one counts only when its last
    segment has arrived, which may be after its client is told."""
    waiting, most = 0, 0
    while waiting <= most:
        state = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        # tcpi_unacked and tcpi_sacked of a socket that listens.
        waiting, most = struct.unpack_from("=II", state, 24)


@asynccontextmanager
async def full_queue() -> AsyncGenerator[str]:
    """The URL of a host where the queue of connections is full: a SYN gets no answer."""
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0, backlog=0)
    server.get_loop().remove_reader(server.sockets[0].fileno())
    port = server.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    await_full_queue(server.sockets[0])
    yield f"http://127.0.0.1:{port}"
    writer.close()
    server.close()


async def test_a_host_that_never_takes_the_connection_was_sent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "_CONNECT_S", 0.2)
    async with full_queue() as url, asyncio.timeout(5.0):
        error = await failure(url, timeout_s=4.0)
    assert (error.kind, error.delivered, error.unreachable) == ("connect", False, True)


async def test_a_caller_that_leaves_before_the_connection_is_no_sign_of_a_dead_host() -> None:
    async with full_queue() as url:
        error = await failure(url, timeout_s=0.2)
    assert (error.kind, error.delivered, error.unreachable) == ("timeout", False, False)


async def test_a_connection_that_ends_after_the_request_leaves_it_open() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ends without a word."""

    async with speaking(speak) as url:
        error = await failure(url)
    assert (error.kind, error.delivered) == ("connection", None)


Reply = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def mcp_session(reply: Reply) -> AsyncGenerator[McpSession]:
    """A session with a server that answers every message, the first ones included, by `reply`."""

    async def post(request: web.Request) -> web.StreamResponse:
        return await reply(await request.json())

    app = web.Application()
    app.router.add_post("/mcp", post)
    async with serving_app(app) as url, open_http_session(max_connections=4, headers={}) as http:
        yield McpSession(lambda: HttpTransport(http, f"{url}/mcp"))


async def test_a_slow_handshake_is_within_the_calls_own_time() -> None:
    async def reply(message: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(1.0)
        if "id" not in message:
            return web.Response(status=202)
        return answer(message, INITIALIZE_RESULT, headers={"mcp-session-id": "s"})

    async with mcp_session(reply) as session:
        started = time.monotonic()
        with pytest.raises(BackendError) as caught:
            await session.call_tool("t", {}, 1.25)
        assert time.monotonic() - started < 2.75
    # The second message of the handshake was not answered: the call itself was never sent.
    assert (caught.value.kind, caught.value.delivered) == ("timeout", False)


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_a_call_whose_handshake_fails_was_not_executed(status: int) -> None:
    async def reply(message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status)

    async with mcp_session(reply) as session:
        with pytest.raises(HttpError) as caught:
            await session.call_tool("t", {}, 1.0)
    assert (caught.value.status, caught.value.delivered) == (status, False)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_a_time_that_is_over_already_is_not_taken_for_no_limit(timeout_s: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with asyncio.timeout(2.0):
            error = await failure(url, timeout_s=timeout_s)
    assert error.kind in ("timeout", "connect")
