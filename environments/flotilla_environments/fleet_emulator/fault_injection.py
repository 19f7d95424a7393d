"""Middleware that counts every request and applies the plan of faults to it."""

import asyncio
from collections.abc import Callable

from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flotilla_environments.fleet_emulator.faults import FaultPlan, Reply
from flotilla_environments.fleet_emulator.operation_names import (
    classify_request,
    instance_of,
    mcp_endpoint,
)
from flotilla_environments.fleet_emulator.request_counters import Counters

ADMIN = "/_emulator"


class FaultInjector:
    """Counts requests and injects faults; `kill` ends an instance by its id."""

    def __init__(
        self, app: ASGIApp, plan: FaultPlan, counters: Counters, kill: Callable[[str], None]
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
            await self._serve_request(scope, receive, send, b"", None)
            return
        body = await _read_body(receive)
        with self._counters.mcp.track_one():
            await self._serve_request(scope, _replay_body(body, receive), send, body, endpoint)

    async def _serve_request(
        self, scope: Scope, receive: Receive, send: Send, body: bytes, endpoint: str | None
    ) -> None:
        name = classify_request(scope["method"], scope["path"], body)
        self._counters.requests[name] += 1
        counted = self._count_answers(name, send)
        delay, reply = self._plan.next_reply(name, endpoint)
        if reply is None and endpoint is not None:
            reply = self._check_rate_limit()
        if delay:
            await asyncio.sleep(delay)
        if reply is None:
            await self._app(scope, receive, counted)
            return
        self._counters.injected[f"{name} {reply.status}"] += 1
        await self._send_reply(reply, scope, receive, counted)

    def _check_rate_limit(self) -> Reply | None:
        settings = self._plan.settings
        if settings.mcp_limit is None or self._counters.mcp.now <= settings.mcp_limit:
            return None
        body = {"detail": "Rate limit exceeded"}
        return Reply(status=429, body=body, retry_after=settings.mcp_retry_after)

    async def _send_reply(self, reply: Reply, scope: Scope, receive: Receive, send: Send) -> None:
        if reply.applied:
            await self._app(scope, receive, _discard_message)
        instance_id = instance_of(scope["path"])
        if reply.kill and instance_id is not None:
            self._kill(instance_id)
        if reply.hang and await _client_left(receive, reply.hang):
            return
        await _build_response(reply)(scope, receive, send)

    def _count_answers(self, name: str, send: Send) -> Send:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counters.answers[f"{name} {message['status']}"] += 1
            await send(message)

        return send_counted


def _build_response(reply: Reply) -> Response:
    headers = {} if reply.retry_after is None else {"retry-after": f"{reply.retry_after:g}"}
    if isinstance(reply.body, str):
        return HTMLResponse(reply.body, reply.status, headers)
    return JSONResponse(reply.body, reply.status, headers)


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return b"".join(parts)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Receive the body again, and then the connection's further messages."""
    left = [body]

    async def receive_replayed() -> Message:
        # Only the body returns at once: a `receive` that never waits would make a listener for
        # the client's departure spin.
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return receive_replayed


async def _discard_message(message: Message) -> None:
    """Throw an answer away."""


async def _client_left(receive: Receive, seconds: float) -> bool:
    """Wait; return True when the client has gone before the time was over."""
    try:
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                continue
    except TimeoutError:
        return False
    return True
