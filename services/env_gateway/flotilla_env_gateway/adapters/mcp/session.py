"""A session with an MCP server: the official SDK's, over a transport of ours.

Protocol, negotiation, the server's own requests and cancellation are the SDK's work. Its
transports are not used: they end a whole session on one failed connection, turn HTTP statuses into
errors of JSON-RPC, and bound nothing."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from mcp import ClientSession, MCPError
from mcp.client.session import ClientRequestContext, IncomingMessage, MessageHandlerFnT
from mcp.shared.dispatcher import CallOptions
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    ErrorData,
    InputRequest,
    InputResponse,
    ToolListChangedNotification,
)
from pydantic import ValidationError

from flotilla_common.aio.concurrency import cancel_tasks, running_tasks
from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.adapters.http_client import HttpError
from flotilla_env_gateway.adapters.mcp.revision import (
    CLIENT,
    Mirrored,
    ServerRevision,
    mirrored_arguments,
    refuses_revision,
    stamp_request,
)
from flotilla_env_gateway.adapters.mcp.transport import Transport, request_until
from flotilla_env_gateway.adapters.mcp.wire import (
    cut_error,
    parse_call_result,
    parse_tools,
    too_large_result,
)
from flotilla_env_gateway.large_values import run_aside_for
from flotilla_env_gateway.ports import BackendError, CallResult, Text, Tool

_LOG = get_logger(__name__)
# A request that is refused thus can never succeed.
_FINAL = {PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS}
_MAX_PAGES = 1000
# Statuses of an open session that say nothing about it.
_PASSING = {408, 413, 425, 429}


class _Client(ClientSession):
    """The SDK's session, of a client that offers its server nothing."""

    async def dispatch_input_request(
        self, ctx: ClientRequestContext, request: InputRequest
    ) -> InputResponse | ErrorData:
        return ErrorData(code=METHOD_NOT_FOUND, message=f"{request.method} is not offered here")


@dataclass(slots=True)
class _Live:
    """An open session. Its owner, one task, enters and leaves the SDK's task groups. It is
    `assumed` until an answer proves that the server still speaks what is remembered of it."""

    transport: Transport
    client: _Client
    dispatcher: JSONRPCDispatcher
    closing: asyncio.Event
    owner: asyncio.Task[None]
    assumed: bool = False

    @property
    def version(self) -> str | None:
        """The revision if it is one without sessions at the server, None otherwise."""
        modern = self.client.discover_result is not None
        return self.client.protocol_version if modern else None


class _ForgottenError(Exception):
    """The server does not know the session, and a new one would do as well."""


class McpSession:
    """A session that opens on first use and allows concurrent requests.

    State belongs to the session: once the server has forgotten it, it is lost, and so is the
    episode. With `stateless` it is opened anew instead, because the state is somewhere else.
    `revision` is what all sessions with the server know of it. From 2026-07-28 on a session is
    only ours, and takes no request to open.

    Example: `session = McpSession(lambda: HttpTransport(http, url, limits=limits))`, then
    `await session.list_tools(10.0)`, `await session.call_tool("add", {"n": 1}, 10.0)` and
    `await session.close(1.0)`."""

    def __init__(
        self,
        connect: Callable[[], Transport],
        *,
        stateless: bool = False,
        revision: ServerRevision | None = None,
    ) -> None:
        # Called whenever the server says that its tools have changed.
        self.on_tools_changed: Callable[[], None] = lambda: None
        self._connect = connect
        self._stateless = stateless
        self._revision = revision or ServerRevision()
        self._mirrored: dict[str, Mirrored] = {}
        self._live: _Live | None = None
        self._opening = asyncio.Lock()
        self._lost = ""

    @property
    def lost(self) -> str:
        """The reason why the session is gone for good; "" while it may serve."""
        return self._lost or (self._live.transport.ended if self._live is not None else "")

    async def open_session(self, timeout_s: float) -> None:
        """Open the session, which proves that the server is ready. Raises BackendError."""
        await self._open_until(loop_time() + timeout_s)

    async def list_tools(self, timeout_s: float) -> Sequence[Tool]:
        """Return the tools of all pages. Raises BackendError, also for pages without end."""
        tools: dict[str, Tool] = {}
        cursors: set[str] = set()
        cursor, size = "", 0
        until = loop_time() + timeout_s
        for _ in range(_MAX_PAGES):
            live = await self._open_until(until)
            params = {"cursor": cursor} if cursor else {}
            try:
                result = await self._request("tools/list", params, until)
            except MCPError as error:
                raise _answered_error(error) from error
            size += await run_aside_for(result, partial(_add_page, tools, result, self._mirrors))
            cursor = result.get("nextCursor") or ""
            if not cursor:
                return list(tools.values())
            if cursor in cursors or size > live.transport.limits.bytes:
                break
            cursors.add(cursor)
        raise _listing_error(f"the server's pages of tools do not end: {len(tools)} so far")

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> CallResult:
        """Call a tool. An error that the server answers is a result; all others are raised, as
        BackendError."""
        params = {"name": name, "arguments": arguments}
        try:
            result = await self._request("tools/call", params, loop_time() + timeout_s)
        except MCPError as error:
            message = f"{error.code}: {cut_error(error.message)}"
            if error.code == INVALID_PARAMS:
                raise BackendError(
                    "jsonrpc", message, delivered=False, bad_arguments=True
                ) from error
            return CallResult((Text(message),), is_error=True)
        except BackendError as error:
            if error.kind == "too_large" and error.delivered is None:
                return too_large_result(error)
            raise
        return await run_aside_for(result, lambda: parse_call_result(result))

    async def is_alive(self, timeout_s: float) -> bool:
        """Return whether the server still knows the session: any answer proves it. Raises
        BackendError if that is unknown."""
        try:
            await self._request("ping", {}, loop_time() + timeout_s)
        except MCPError:
            return True
        except BackendError as error:
            if not error.lost:
                raise
            return False
        return True

    async def close(self, timeout_s: float = 0.0) -> None:
        """End the session, also at the server if that is given time. Raises BackendError."""
        live, self._live = self._live, None
        self._lost = self._lost or "it was closed"
        if live is None:
            return
        try:
            if timeout_s > 0:
                await live.transport.close(timeout_s)
        finally:
            await _end_session(live)

    async def _request(
        self, method: str, params: Mapping[str, Any], until: float
    ) -> dict[str, Any]:
        """Send a request and return its result. Raises MCPError for an error that the server
        answered, and BackendError."""
        try:
            return await self._request_once(method, params, until)
        except _ForgottenError:
            pass
        try:
            return await self._request_once(method, params, until)
        except _ForgottenError as error:
            raise _lost_error(str(error), delivered=False) from error

    async def _request_once(
        self, method: str, params: Mapping[str, Any], until: float
    ) -> dict[str, Any]:
        """Send a request in the session that is open, or now opened. Raises as `_request`, and
        _ForgottenError for a session that another one may replace: nothing was executed."""
        live: _Live | None = None
        try:
            live = await self._open_until(until)
            return await _exchange(live, method, params, until, self._mirrored)
        except HttpError as error:
            if live is not None and live.assumed and refuses_revision(error):
                await self._negotiate_anew(live, error)
            if self._stateless and error.status == 404:
                if live is None:
                    raise _lost_error(str(error), delivered=False) from error
                await self._forget(live)
                raise _ForgottenError(str(error)) from error
            if live is None or live.version is not None or not _means_forgotten(error):
                raise
            raise self._lose(str(error), delivered=False) from error
        except MCPError as error:
            if isinstance(error.data, BackendError):
                # Found by the transport in place of an answer; no server can send such data.
                raise error.data from error
            if live is not None and live.assumed and refuses_revision(error):
                await self._negotiate_anew(live, error)
            if live is not None and error.code == CONNECTION_CLOSED and live.transport.ended:
                raise self._lose(live.transport.ended, delivered=None) from error
            raise

    async def _forget(self, live: _Live) -> None:
        """Let the next request open a new session, unless another one has done so already."""
        if self._live is live:
            self._live = None
            await _end_session(live)

    @property
    def _mirrors(self) -> dict[str, Mirrored] | None:
        """Where arguments that go into headers too are noted; None where none do."""
        live = self._live
        return None if live is None or live.version is None else self._mirrored

    async def _negotiate_anew(self, live: _Live, error: Exception) -> NoReturn:
        """Forget what the server spoke: another one may have taken its place."""
        self._revision.forget()
        await self._forget(live)
        raise _ForgottenError(str(error)) from error

    def _lose(self, why: str, *, delivered: bool | None) -> BackendError:
        if not self._lost:
            self._lost = why
            _LOG.warning("mcp_session_lost", why=why)
        return _lost_error(self._lost, delivered=delivered)

    async def _open_until(self, until: float) -> _Live:
        """Return the open session, opening it first if necessary. Until then nothing of a request
        is sent. Raises BackendError."""
        if lost := self.lost:
            raise self._lose(lost, delivered=False)
        if self._live is not None:
            return self._live
        try:
            async with asyncio.timeout_at(until), self._opening:
                if self._live is None:
                    self._live = await self._open_once(until)
                return self._live
        except TimeoutError:
            message = "the session was not open in time"
            raise BackendError("timeout", message, delivered=False) from None
        except BackendError as error:
            error.delivered = False
            raise

    async def _open_once(self, until: float) -> _Live:
        transport = self._connect()
        started: asyncio.Future[_Live] = asyncio.get_running_loop().create_future()
        owner = asyncio.create_task(_own_session(transport, started, self._receive_notification))
        try:
            live = await started
            live.assumed = await self._revision.agree(live.client, until)
        except BaseException as error:
            await cancel_tasks([owner])
            if not isinstance(error, MCPError | ValidationError | RuntimeError):
                raise
            raise self._opening_error(transport, error) from error
        return live

    async def _receive_notification(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.on_tools_changed()

    def _opening_error(self, transport: Transport, error: Exception) -> BackendError:
        if isinstance(error, MCPError):
            if error.code == CONNECTION_CLOSED and transport.ended:
                return self._lose(transport.ended, delivered=False)
            return _answered_error(error)
        message = f"the answer to initialize is not as MCP has it: {error}"
        return BackendError("protocol", message[:500], delivered=False, invalid=True)


async def _own_session(
    transport: Transport,
    started: asyncio.Future[_Live],
    receive: MessageHandlerFnT,
) -> None:
    """Run a session until it is to close: its task groups must be left by the task that entered
    them."""
    closing, owner = asyncio.Event(), asyncio.current_task()
    assert owner is not None
    dispatcher = JSONRPCDispatcher(transport.received, transport)
    client = _Client(dispatcher=dispatcher, client_info=CLIENT, message_handler=receive)
    async with running_tasks(transport.run()), client:
        started.set_result(_Live(transport, client, dispatcher, closing, owner))
        await closing.wait()


async def _end_session(live: _Live) -> None:
    live.closing.set()
    await asyncio.wait({live.owner})
    if error := None if live.owner.cancelled() else live.owner.exception():
        _LOG.error("mcp_session_failed", error=repr(error))


async def _exchange(
    live: _Live,
    method: str,
    params: Mapping[str, Any],
    until: float,
    mirrored: Mapping[str, Mirrored],
) -> dict[str, Any]:
    """Send a request in an open session, and tell the server if the answer is no longer
    awaited."""
    options: CallOptions = {}
    if live.version is not None:
        # There is no ping; this too any server can answer.
        method = "server/discover" if method == "ping" else method
        params, options["headers"] = stamp_request(live.version, method, params, mirrored)
        options["cancel_on_abandon"] = not live.transport.has_exchanges
    request_until.set(until)
    left_s = seconds_left(until)
    try:
        async with asyncio.timeout(left_s):
            result = await live.dispatcher.send_raw_request(method, params, options)
    except TimeoutError:
        message = f"no answer to {method} within {left_s:.1f} s"
        raise BackendError("timeout", message, delivered=None) from None
    live.assumed = False
    return result


def _add_page(
    tools: dict[str, Tool], page: Mapping[str, Any], mirrored: dict[str, Mirrored] | None
) -> int:
    """Add the tools of a page, and which of their arguments are `mirrored` if any can be; return
    their size. Raises BackendError."""
    size = 0
    for tool in parse_tools(page):
        found = {} if mirrored is None else mirrored_arguments(tool.input_schema_json)
        if found is None:
            _LOG.warning(
                "tool_not_offered", tool=tool.name[:100], why="its x-mcp-header is invalid"
            )
            continue
        if mirrored is not None:
            mirrored[tool.name] = found
        if tool.name in tools:
            raise _listing_error(f"two tools of the server are named {tool.name[:100]!r}")
        tools[tool.name] = tool
        size += len(tool.name) + len(tool.description) + len(tool.input_schema_json)
    return size


def _means_forgotten(error: HttpError) -> bool:
    """Return True if a refusal within an open session means that the session is gone."""
    return 400 <= error.status < 500 and error.status not in _PASSING


def _answered_error(error: MCPError) -> BackendError:
    """Return the failure that an answered error is for a request that is not a tool's call."""
    message = f"{error.code}: {cut_error(error.message)}"
    return BackendError("jsonrpc", message, delivered=False, invalid=error.code in _FINAL)


def _listing_error(message: str) -> BackendError:
    return BackendError("protocol", message, delivered=False, invalid=True)


def _lost_error(why: str, *, delivered: bool | None) -> BackendError:
    message = f"the session with the MCP server is lost: {why}"
    return BackendError("lost", message, delivered=delivered, lost=True)
