"""The part of Slack's API that a notifier needs, over a real socket, with injected faults."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "xoxb-000000000000-a-canary-token"
CHANNEL_ID, CHANNEL_NAME = "C0TRAINING", "#fleet-training-runs"


@dataclass
class Fault:
    """The result of one request: an answer in place of Slack's own, or a cut connection.

    With `taken`, the message is in the channel all the same.
    """

    status: int = 200
    error: str = ""
    retry_after: str = ""
    cut: bool = False
    taken: bool = False


@dataclass
class SlackDouble:
    """`messages` are as the channel shows them, oldest first."""

    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    faults: list[Fault] = field(default_factory=list[Fault])
    requests: int = 0
    readable: bool = True

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.messages]

    @property
    def keys(self) -> list[str]:
        return [message["metadata"]["event_payload"]["key"] for message in self.messages]

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        body = await request.json()
        problem = self._problem(request, body["channel"])
        if problem:
            return _no(problem)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and not fault.taken:
            return self._fail(fault, request)
        message = {**body, "ts": f"1700000000.{len(self.messages):06d}"}
        self.messages.append(message)
        if fault is not None:
            return self._fail(fault, request)
        return web.json_response({"ok": True, "channel": CHANNEL_ID, "ts": message["ts"]})

    async def who(self, request: web.Request) -> web.StreamResponse:
        problem = self._problem(request, CHANNEL_ID, by_id=True)
        known = {"ok": True, "user": "flotilla", "team": "Fleet"}
        return _no(problem) if problem else web.json_response(known)

    async def history(self, request: web.Request) -> web.StreamResponse:
        problem = self._problem(request, request.query["channel"], by_id=True)
        if problem or not self.readable:
            return _no(problem or "missing_scope")
        found = [m for m in self.messages if "thread_ts" not in m]
        return web.json_response({"ok": True, "messages": found[::-1]})

    async def replies(self, request: web.Request) -> web.StreamResponse:
        problem = self._problem(request, request.query["channel"], by_id=True)
        if problem or not self.readable:
            return _no(problem or "missing_scope")
        parent = request.query["ts"]
        found = [m for m in self.messages if parent in (m["ts"], m.get("thread_ts"))]
        return web.json_response({"ok": True, "messages": found})

    def _problem(self, request: web.Request, channel: str, *, by_id: bool = False) -> str:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return "invalid_auth"
        known = (CHANNEL_ID,) if by_id else (CHANNEL_ID, CHANNEL_NAME)
        return "" if channel in known else "channel_not_found"

    def _fail(self, fault: Fault, request: web.Request) -> web.StreamResponse:
        if fault.cut and request.transport is not None:
            request.transport.close()
        headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
        return web.json_response(
            {"ok": False, "error": fault.error or "fatal_error"},
            status=fault.status,
            headers=headers,
        )


def _no(error: str) -> web.Response:
    return web.json_response({"ok": False, "error": error})


@asynccontextmanager
async def slack(port: int = 0) -> AsyncGenerator[SlackDouble]:
    """Serves until the end of the block."""
    double = SlackDouble()
    app = web.Application()
    app.router.add_post("/api/chat.postMessage", double.post)
    app.router.add_post("/api/auth.test", double.who)
    app.router.add_get("/api/conversations.history", double.history)
    app.router.add_get("/api/conversations.replies", double.replies)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, at = runner.addresses[0][:2]
    double.url = f"http://{host}:{at}/api"
    try:
        yield double
    finally:
        await runner.cleanup()
