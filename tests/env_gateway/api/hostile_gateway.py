"""A gateway on a real socket over an MCP server that answers whatever a test gives it."""

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from aiohttp import web

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_env_gateway.adapters.mcp.backend import build_mcp_backend
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.ports import Execution
from tests.env_gateway.api.held_loop import Held, held_loops
from tests.env_gateway.api.raw_wire import Wire
from tests.support.fake_gateway import task_json
from tests.support.http_server import serving_app
from tests.support.threaded_gateway import ServedGateway, served

_ANY_SIZE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
INITIALIZE_RESULT = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "serverInfo": {"name": "hostile", "version": "1"},
}
TOOLS = [{"name": "act", "inputSchema": {"type": "object"}}]


@dataclass(slots=True)
class Server:
    """Answers `tools/call` with `body`, or around a `result`, and `tools/list` with `listed`; the
    rest as it should be."""

    url: str
    thread: threading.Thread
    body: bytes | None = None
    result: bytes = b"{}"
    listed: bytes | None = None
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    status: int = 200

    async def answer(self, request: web.Request) -> web.Response:
        message = await request.json()
        number = message.get("id")
        if number is None:
            return web.Response(status=202)
        listed = self.listed if message["method"] == "tools/list" else None
        if message["method"] != "tools/call" and listed is None:
            reported = {**INITIALIZE_RESULT, "tools": TOOLS}
            return web.json_response({"jsonrpc": "2.0", "id": number, "result": reported})
        body = self.body if listed is None else listed
        if body is None:
            body = b'{"jsonrpc": "2.0", "id": %d, "result": %b}' % (number, self.result)
        if self.content_type == "text/event-stream":
            body = b"data: " + body + b"\n\n"
        headers = {"content-type": self.content_type, **self.headers}
        return web.Response(body=body, status=self.status, headers=headers)


@contextmanager
def hostile_server() -> Generator[Server]:
    """Serve in a thread of its own."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    handler: list[Server] = []

    async def answer(request: web.Request) -> web.Response:
        return await handler[0].answer(request)

    async def serve() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/mcp", answer)
        async with serving_app(app) as url:
            stop = asyncio.Event()
            started.set_result((url, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    url, loop, stop = started.result(10.0)
    handler.append(Server(f"{url}/mcp", thread))
    try:
        yield handler[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@dataclass(slots=True)
class Hostile:
    """A gateway with one open episode of the hostile server."""

    wire: Wire
    server: Server
    held: Held
    served: ServedGateway
    opened: int = 0

    def open(self, task: str) -> pb.OpenEpisodeResponse:
        """Open an episode with this task, close it and return its last state. Raises Refused."""
        answer = self._opened(task)
        self.wire.close(answer.episode_id)
        return answer

    def _opened(self, task: str) -> pb.OpenEpisodeResponse:
        self.opened += 1
        request = pb.OpenEpisodeRequest(
            request_id=f"open-{self.opened}",
            run_id="run",
            group_id=f"open-{self.opened}",
            opening=1,
            task_json=task,
            worker_id="rollout-0",
        )
        last = self.wire.send("OpenEpisode", request.SerializeToString())[-1]
        return pb.OpenEpisodeResponse.FromString(last)

    def call(self, arguments: str = "{}") -> pb.CallToolResponse:
        return self.wire.call("act", arguments)

    def graded(self, execution: Execution) -> pb.GradeResponse:
        """The grade of an episode whose verifier ends so. Raises Refused."""
        self.served.grader.executions.clear()
        self.served.grader.executions.extend([execution] * 4)
        episode_id = self._opened(task_json(env_id="fake")).episode_id
        try:
            return self.wire.grade(pb.GradeRequest(header=pb.GradeHeader(episode_id=episode_id)))
        finally:
            self.wire.close(episode_id)


@contextmanager
def hostile_gateway() -> Generator[Hostile]:
    with hostile_server() as server:
        make = partial(build_mcp_backend, McpServer(url=server.url), max_calls=8)
        mcp = {"url": server.url}
        breaker = {"window": 10_000, "instance_failures": 1000}
        changes: dict[str, Any] = {"backend": "mcp", "servers": [mcp], "breaker": breaker}
        # No client renews the one episode that thousands of cases share.
        changes |= {"lease_ttl_s": 3600.0, "budget_s": 7200.0}
        with (
            held_loops(server.thread, threading.current_thread()) as held,
            served(make=make, **changes) as gateway,
            grpc.insecure_channel(gateway.address, options=_ANY_SIZE) as channel,
        ):
            wire = Wire(gateway, channel)
            wire.episode_id = wire.open("witness")[-1].episode_id
            yield Hostile(wire, server, held, gateway)
