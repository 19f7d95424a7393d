"""Servers of every revision of MCP: how it is found out which one to speak, and how rarely."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_common.rpc.free_ports import free_port
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.http_client import HttpError, open_http_session
from flotilla_env_gateway.adapters.mcp.backend import build_mcp_backend
from flotilla_env_gateway.adapters.mcp.http_transport import HttpTransport
from flotilla_env_gateway.adapters.mcp.revision import ServerRevision
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import BackendError, ProvisionRequest, Text
from tests.env_gateway.adapters.mcp.test_session import TOOL, Handler, answer, server_with
from tests.support.environment_processes import environment_command
from tests.support.fake_gateway import open_spec, opened, running, task_json
from tests.support.http_server import serving_app

MODULE = "tests.env_gateway.adapters.mcp.revisions_server"
NEW = "2026-07-28"
DISCOVERED = {"supportedVersions": [NEW], "capabilities": {"tools": {}}}
HANDSHAKE = ["initialize", "notifications/initialized"]


class ShopServer:
    """A process of `revisions_server`. It may be replaced at its address by one that speaks other
    revisions."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/mcp"

    def take_log(self) -> list[str]:
        """Return what it was asked since this was called last."""
        lines = self._log.read_text().split() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return lines

    def start(self, speaks: str) -> None:
        self.stop()
        command = [sys.executable, "-m", MODULE, speaks, str(self._port), str(self._log)]
        self._process = subprocess.Popen(command)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[ShopServer]:
    server = ShopServer(tmp_path / "log")
    yield server
    server.stop()


@asynccontextmanager
async def gateway_at(shop: ShopServer, sessions: str) -> AsyncGenerator[Gateway]:
    server = {"url": shop.url, "sessions": sessions}
    backend = build_mcp_backend(McpServer.model_validate(server), max_calls=64)
    retry = {"base_s": 0.05, "cap_s": 0.2}
    try:
        async with running(backend, backend="mcp", servers=[server], retry=retry) as gateway:
            yield gateway
    finally:
        await backend.close()


async def play(gateway: Gateway, attempt: int) -> str:
    """Play an episode, waiting for the server; return what its call was answered."""
    session = await opened(gateway, open_spec(attempt))
    result, _ = await gateway.call_tool(session, 0, "add", "{}", 10.0)
    gateway.close(session.episode.episode_id)
    assert result.outcome is ToolOutcome.OK, result
    return "".join(part.text for part in result.parts if isinstance(part, Text))


@pytest.mark.parametrize(
    ("sessions", "found_by"),
    [
        ("stateless", ["server/discover"]),
        ("stateful", ["initialize", "server/discover"]),
    ],
)
async def test_a_server_without_the_handshake_plays_episodes_of_two_requests(
    sessions: str, found_by: list[str], shop: ShopServer
) -> None:
    shop.start("new")
    async with gateway_at(shop, sessions) as gateway:
        assert await play(gateway, 0) == "1 items"
        asked = shop.take_log()
        assert [*asked[-2 - len(found_by) :]] == [*found_by, "tools/list", "tools/call"]
        assert await play(gateway, 1) == "2 items"
        assert shop.take_log() == ["tools/list", "tools/call"]


async def test_a_server_with_the_handshake_is_asked_once_for_many_sessions(
    shop: ShopServer,
) -> None:
    shop.start("old")
    async with gateway_at(shop, "stateless") as gateway:
        await asyncio.gather(*(play(gateway, number) for number in range(20)))
        asked = shop.take_log()
        await play(gateway, 20)
    assert (asked.count("server/discover"), asked.count("initialize")) == (1, 20)
    assert sorted(shop.take_log()) == sorted([*HANDSHAKE, "tools/list", "tools/call"])


@pytest.mark.parametrize(
    ("sessions", "opened_by"), [("stateless", ["server/discover"]), ("stateful", HANDSHAKE)]
)
async def test_of_a_server_that_knows_both_a_session_is_kept_where_it_has_the_state(
    sessions: str, opened_by: list[str], shop: ShopServer
) -> None:
    shop.start("both")
    async with gateway_at(shop, sessions) as gateway:
        await play(gateway, 0)
    asked = [line for line in shop.take_log() if line not in ("GET", "DELETE")]
    assert sorted(asked) == sorted([*opened_by, "tools/list", "tools/call"])


@pytest.mark.parametrize(("before", "after"), [("new", "old"), ("old", "new")])
async def test_a_server_that_is_replaced_by_one_of_another_revision_is_asked_anew(
    before: str, after: str, shop: ShopServer
) -> None:
    shop.start(before)
    async with gateway_at(shop, "stateless") as gateway:
        await play(gateway, 0)
        shop.take_log()
        shop.start(after)
        assert await play(gateway, 1) == "1 items"
        asked = shop.take_log()
        await play(gateway, 2)
    assert asked.count("server/discover") == 1
    assert asked[0] == ("tools/list" if before == "new" else "initialize"), "as remembered"
    then = shop.take_log()
    assert "server/discover" not in then
    assert then.count("initialize") == (1 if after == "old" else 0)


async def test_a_call_that_is_cancelled_ends_its_exchange_and_nothing_else_is_sent(
    shop: ShopServer,
) -> None:
    shop.start("new")
    async with gateway_at(shop, "stateless") as gateway:
        await play(gateway, 0)
        session = await opened(gateway, open_spec(1))
        shop.take_log()
        result, _ = await gateway.call_tool(session, 0, "wait", "{}", 1.0)
        assert result.outcome is ToolOutcome.OUTCOME_UNKNOWN
        asked: list[str] = []
        async with asyncio.timeout(10.0):
            while "cancelled" not in asked:
                asked += shop.take_log()
                await asyncio.sleep(0.05)
        result, _ = await gateway.call_tool(session, 1, "add", "{}", 10.0)
        assert result.parts == (Text("2 items"),)
    assert asked + shop.take_log() == ["tools/call", "waiting", "cancelled", "tools/call"]


@asynccontextmanager
async def sessions_with(
    handle: Handler,
) -> AsyncGenerator[tuple[Callable[[], McpSession], list[str]]]:
    """What makes a session with such a server, which is asked before any handshake."""
    revision = ServerRevision(ask=True)
    async with (
        server_with(handle, session_id=None) as (url, methods),
        open_http_session(max_connections=4, headers={}) as http,
    ):
        connect = lambda: HttpTransport(http, url)  # noqa: E731
        yield lambda: McpSession(connect, stateless=True, revision=revision), methods


def refused(message: dict[str, Any], code: int, status: int = 200, **more: Any) -> web.Response:
    error = {"code": code, "message": "no", **more}
    body = {"jsonrpc": "2.0", "id": message["id"], "error": error}
    return web.json_response(body, status=status)


async def close_connection(request: web.Request, message: dict[str, Any]) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def never_answer(request: web.Request, message: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60.0)
    return web.Response()


def answering(make: Callable[[dict[str, Any]], web.Response]) -> Handler:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.Response:
        return make(message)

    return handle


ODD_ANSWERS: dict[str, Handler] = {
    **{
        f"error {code} with status {status}": answering(
            lambda message, code=code, status=status: refused(message, code, status)
        )
        for code in (-32601, -32600, -32602, -32000, -32001, -32022, 0)
        for status in (200, 400, 404)
    },
    **{
        f"status {status}": answering(lambda _, status=status: web.Response(status=status))
        for status in (202, 204, 302, 400, 401, 403, 404, 405, 406, 415, 422, 500, 501, 502, 504)
    },
    "older revisions": answering(
        lambda message: answer(message, {**DISCOVERED, "supportedVersions": ["2025-06-18"]})
    ),
    "older revisions, as an error": answering(
        lambda message: refused(
            message, -32022, data={"supported": ["2025-06-18"], "requested": NEW}
        )
    ),
    "no revisions": answering(lambda message: answer(message, {})),
    "another id": answering(lambda message: answer({"id": "other"}, DISCOVERED)),
    "no JSON": answering(lambda _: web.Response(text="hello", content_type="text/html")),
    "half a stream": answering(lambda _: web.Response(text=":", content_type="text/event-stream")),
    "a closed connection": close_connection,
    "nothing": never_answer,
}


@pytest.mark.parametrize("how", ODD_ANSWERS)
async def test_a_server_that_does_not_know_the_question_is_spoken_to_as_before(how: str) -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        if message["method"] == "server/discover":
            assert request.headers["mcp-protocol-version"] == NEW
            return await ODD_ANSWERS[how](request, message)
        assert request.headers["mcp-protocol-version"] == "2025-06-18"
        assert "mcp-method" not in request.headers and "params" not in message
        return answer(message, {"tools": [TOOL]})

    async with sessions_with(handle) as (make_session, methods):
        for _ in range(2):
            session = make_session()
            assert len(await session.list_tools(8.0)) == 1
            await session.close()
    once = ["initialize", "tools/list"]
    asked = [method for method in methods if method != "notifications/initialized"]
    assert asked == ["server/discover", *once, *once]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_is_overloaded_is_not_asked_twice_at_once(status: int) -> None:
    statuses = [status]

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        if statuses:
            return web.Response(status=statuses.pop(), headers={"Retry-After": "1"})
        if message["method"] == "server/discover":
            return answer(message, DISCOVERED)
        return answer(message, {"tools": [TOOL]})

    async with sessions_with(handle) as (make_session, methods):
        session = make_session()
        with pytest.raises(HttpError) as caught:
            await session.list_tools(5.0)
        assert (caught.value.status, caught.value.delivered) == (status, False)
        assert caught.value.retry_after_s == 1.0
        assert len(await session.list_tools(5.0)) == 1
    assert methods == ["server/discover", "server/discover", "tools/list"]


async def test_a_server_of_newer_revisions_only_is_refused_with_both() -> None:
    data = {"supported": ["2031-01-01", "2030-01-01"], "requested": NEW}

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return refused(message, -32022, 400, data=data)

    async with sessions_with(handle) as (make_session, methods):
        with pytest.raises(BackendError) as caught:
            await make_session().list_tools(5.0)
    assert methods == ["server/discover"]
    assert (caught.value.invalid, caught.value.delivered) == (True, False)
    assert "speaks MCP 2031-01-01, 2030-01-01 only, and the gateway" in str(caught.value)
    assert str(caught.value).endswith(f", {NEW}")


async def test_a_slow_server_names_its_revision_when_it_refuses_the_handshake() -> None:
    slow = [60.0]

    async def handle(request: web.Request) -> web.StreamResponse:
        message = await request.json()
        if message["method"] == "initialize":
            return refused(message, -32022, 400, data={"supported": [NEW], "requested": "2025"})
        if message["method"] == "server/discover":
            await asyncio.sleep(slow.pop() if slow else 0.0)
            return answer(message, DISCOVERED)
        return answer(message, {"tools": [TOOL]})

    app = web.Application()
    app.router.add_post("/mcp", handle)
    async with (
        serving_app(app) as url,
        open_http_session(max_connections=4, headers={}) as http,
    ):
        connect = lambda: HttpTransport(http, f"{url}/mcp")  # noqa: E731
        session = McpSession(connect, stateless=True, revision=ServerRevision(ask=True))
        assert len(await session.list_tools(4.0)) == 1
        await session.close()


def discovering(handle: Handler) -> Handler:
    """Answer `server/discover`, and leave all else to `handle`."""

    async def answer_or_handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        assert message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == NEW
        assert request.headers["mcp-protocol-version"] == NEW
        assert request.headers["mcp-method"] == message["method"]
        if message["method"] == "server/discover":
            return answer(message, DISCOVERED)
        return await handle(request, message)

    return answer_or_handle


async def test_a_request_for_input_is_an_error_that_the_policy_reads() -> None:
    asked = {"method": "elicitation/create", "params": {"message": "Sure?"}}

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return answer(message, {"resultType": "input_required", "inputRequests": {"1": asked}})

    async with sessions_with(discovering(handle)) as (make_session, methods):
        result = await make_session().call_tool("t", {}, 5.0)
    assert result.is_error
    assert result.parts == (Text("-32601: elicitation/create is not offered here"),)
    assert methods == ["server/discover", "tools/call"]


async def test_arguments_that_a_server_wants_in_headers_are_sent_there_too() -> None:
    def tool(name: str, wanted: object) -> dict[str, Any]:
        properties = {"city": {"type": "string", "x-mcp-header": wanted}}
        return {"name": name, "inputSchema": {"type": "object", "properties": properties}}

    seen: list[tuple[str, str | None]] = []

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        if message["method"] == "tools/list":
            return answer(message, {"tools": [tool("t", "City"), tool("bad", "no token")]})
        seen.append((request.headers["mcp-name"], request.headers.get("mcp-param-city")))
        return answer(message, {"content": []})

    async with sessions_with(discovering(handle)) as (make_session, _):
        session = make_session()
        offered = [tool.name for tool in await session.list_tools(5.0)]
        assert offered == ["t"], "MCP forbids to offer the other"
        await session.call_tool("t", {"city": "Ulm"}, 5.0)
        await session.call_tool("t", {"city": "Köln\n"}, 5.0)
        await session.call_tool("t", {}, 5.0)
        await session.call_tool("näme", {"city": "Ulm"}, 5.0)
        with pytest.raises(BackendError) as caught:
            await session.call_tool("t", {"city": "\ud800"}, 5.0)
    assert caught.value.bad_arguments
    encoded = "=?base64?S8O2bG4K?="
    assert seen == [("t", "Ulm"), ("t", encoded), ("t", None), ("=?base64?bsOkbWU=?=", None)]


async def test_any_answer_proves_that_a_server_without_sessions_is_there() -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return answer(message, {"content": []})

    async with sessions_with(discovering(handle)) as (make_session, methods):
        session = make_session()
        await session.call_tool("t", {}, 5.0)
        assert await session.is_alive(5.0)
        await session.close(5.0)
    assert methods == ["server/discover", "tools/call", "server/discover"]


async def test_where_there_are_no_sessions_a_method_that_is_not_found_is_an_answer() -> None:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return refused(message, -32601, 404)

    async with sessions_with(discovering(handle)) as (make_session, methods):
        session = make_session()
        result = await session.call_tool("t", {}, 5.0)
        assert (result.is_error, result.parts) == (True, (Text("-32601: no"),))
    assert methods == ["server/discover", "tools/call"]


@pytest.mark.parametrize("status", [400, 401, 403, 405, 422])
async def test_where_there_are_no_sessions_a_refusal_loses_none(status: int) -> None:
    refusing = False

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status) if refusing else answer(message, {"content": []})

    async with sessions_with(discovering(handle)) as (make_session, _):
        session = make_session()
        await session.call_tool("t", {}, 5.0)
        refusing = True
        with pytest.raises(HttpError) as caught:
            await session.call_tool("t", {}, 5.0)
        assert (caught.value.status, caught.value.delivered) == (status, False)
        refusing = False
        assert not (await session.call_tool("t", {}, 5.0)).is_error


# A server over stdio without the handshake, which answers it with its first argument as code.
OVER_STDIO = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "initialize":
        data = {"supported": ["2026-07-28"], "requested": "2025-11-25"}
        answer["error"] = {"code": int(sys.argv[1]), "message": "no", "data": data}
    elif asked["method"] == "server/discover":
        answer["result"] = {"supportedVersions": ["2026-07-28"], "capabilities": {}}
    elif asked["method"] == "tools/list":
        answer["result"] = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    else:
        answer["result"] = {"content": [{"type": "text", "text": json.dumps(asked["params"])}]}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("code", [-32022, -32601, -32602])
async def test_over_stdio_a_server_that_refuses_the_handshake_is_asked_what_it_speaks(
    code: int,
) -> None:
    command = environment_command("-c", OVER_STDIO, str(code))
    # A forked server is in no sandbox of the episode's.
    server = McpServer(transport="stdio", command=command, shared_state=True)
    backend = McpStdioBackend(server)
    request = ProvisionRequest("e1", parse_task(task_json()), 60.0)
    try:
        instance = await backend.provision_instance(request, timeout_s=20.0)
        assert [tool.name for tool in await instance.list_tools(timeout_s=20.0)] == ["t"]
        (part,) = (await instance.call_tool("t", {}, timeout_s=20.0)).parts
        assert isinstance(part, Text)
        stamped = json.loads(part.text)["_meta"]
        assert stamped["io.modelcontextprotocol/protocolVersion"] == NEW
        assert await instance.is_alive(timeout_s=20.0)
    finally:
        await backend.close()
