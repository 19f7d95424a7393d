"""Middleware that counts every request and does to it what the plan of faults says."""

import asyncio
from collections.abc import Callable

from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from environments.fleet_emulator.counters import Counters
from environments.fleet_emulator.faults import Plan, Reply
from environments.fleet_emulator.operations import instance_of, mcp_endpoint, operation

ADMIN = "/_emulator"


class Injector:
    """`kill` ends an instance by its id."""

    def __init__(
        self, app: ASGIApp, plan: Plan, counters: Counters, kill: Callable[[str], None]
    ) -> None:
        self._app = app
        self._plan = plan
        self._counters = counters
        self._kill = kill

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(ADMIN):
            await self._app(scope, receive, send)
            return
        endpoint = mcp_endpoint(scope["path"])
        if endpoint is None:
            await self._serve(scope, receive, send, b"", None)
            return
        body = await _read(receive)
        with self._counters.mcp.one():
            await self._serve(scope, _replay(body, receive), send, body, endpoint)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, body: bytes, endpoint: str | None
    ) -> None:
        name = operation(scope["method"], scope["path"], body)
        self._counters.requests[name] += 1
        counted = self._counting(name, send)
        delay, reply = self._plan.strike(name, endpoint)
        if reply is None and endpoint is not None:
            reply = self._crowded()
        if delay:
            await asyncio.sleep(delay)
        if reply is None:
            await self._app(scope, receive, counted)
            return
        self._counters.injected[f"{name} {reply.status}"] += 1
        await self._answer(reply, scope, receive, counted)

    def _crowded(self) -> Reply | None:
        settings = self._plan.settings
        if settings.mcp_limit is None or self._counters.mcp.now <= settings.mcp_limit:
            return None
        body = {"detail": "Rate limit exceeded"}
        return Reply(status=429, body=body, retry_after=settings.mcp_retry_after)

    async def _answer(self, reply: Reply, scope: Scope, receive: Receive, send: Send) -> None:
        if reply.applied:
            await self._app(scope, receive, _discard)
        instance_id = instance_of(scope["path"])
        if reply.kill and instance_id is not None:
            self._kill(instance_id)
        if reply.hang and await _left(receive, reply.hang):
            return
        await _response(reply)(scope, receive, send)

    def _counting(self, name: str, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counters.answers[f"{name} {message['status']}"] += 1
            await send(message)

        return counted


def _response(reply: Reply) -> Response:
    headers = {} if reply.retry_after is None else {"retry-after": f"{reply.retry_after:g}"}
    if isinstance(reply.body, str):
        return HTMLResponse(reply.body, reply.status, headers)
    return JSONResponse(reply.body, reply.status, headers)


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, and then what the connection has to say."""
    left = [body]

    async def replayed() -> Message:
        # Only the body is answered at once: a `receive` that always is makes a listener for
        # the client's departure spin.
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replayed


async def _discard(message: Message) -> None:
    """An answer that nobody gets."""


async def _left(receive: Receive, seconds: float) -> bool:
    """Wait; true when the client has gone before the time was over."""
    try:
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                continue
    except TimeoutError:
        return False
    return True
