"""A thin MCP client over streamable HTTP: pooled connections, one session per environment.

An SDK session per call costs a hundred times the CPU and hides HTTP status and Retry-After, which
the retry rule needs; so this implements the wire protocol, with JSON and SSE answers.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import aiohttp

from services.common.deadlines import loop_time, seconds_left
from services.common.parsing import TextLimits
from services.env_gateway.adapters.http_client import DEFAULT_LIMITS, HttpError, exchange_json
from services.env_gateway.adapters.mcp.requests import McpRequests
from services.env_gateway.adapters.mcp.wire import (
    INITIALIZE,
    INITIALIZED,
    PROTOCOL_VERSION,
    parse_result,
)
from services.env_gateway.ports import BackendError

_HEADERS = {"accept": "application/json, text/event-stream"}


class McpSession(McpRequests):
    """One session with an MCP server. It allows concurrent use, opens on first use, and reopens
    when the server has forgotten it."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        limits: TextLimits = DEFAULT_LIMITS,
    ) -> None:
        """Create an unopened session; `headers` go with every request, besides the pool's own."""
        self.url = url
        self._http = http
        self._limits = limits
        self._base_headers = {**_HEADERS, **(headers or {})}
        self._headers = dict(self._base_headers)
        self._open = False
        self._openings = 0
        self._next_id = 0
        self._opening = asyncio.Lock()

    async def open_session(self, timeout_s: float) -> None:
        """Open the session, which proves that the server is ready. Raises BackendError."""
        until = loop_time() + timeout_s
        async with self._opening:
            if self._open:
                return
            self._headers = dict(self._base_headers)
            result, headers = await self._exchange_messages(
                "initialize", INITIALIZE, seconds_left(until)
            )
            self._headers["mcp-protocol-version"] = result.get("protocolVersion", PROTOCOL_VERSION)
            if session_id := headers.get("mcp-session-id"):
                self._headers["mcp-session-id"] = session_id
                # A server without session ids keeps no state that this could change.
                await self._send_message(INITIALIZED, seconds_left(until))
            self._openings += 1
            self._open = True

    async def send_request(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        """Send a request and return its result. Raises BackendError; `lost` if the server accepts
        neither the session nor a new one."""
        until = loop_time() + timeout_s
        for attempt in range(2):
            opening = None
            try:
                await self._ensure_open(seconds_left(until))
                opening = self._openings
                return (await self._exchange_messages(method, params, seconds_left(until)))[0]
            except HttpError as error:
                if error.status != 404:
                    raise
                # Refused before dispatch: the server has forgotten the session, or is gone.
                if attempt or opening is None:
                    message = f"the environment is gone: {error}"
                    raise BackendError("lost", message, delivered=False, lost=True) from error
                # Unless another refused request has reopened it meanwhile.
                self._open = self._open and opening != self._openings
        raise AssertionError("the second attempt returns or raises")

    async def close(self, timeout_s: float) -> None:
        """End the session at the server, if it has an id. Raises BackendError."""
        self._open = False
        if "mcp-session-id" in self._headers:
            headers, self._headers = self._headers, dict(self._base_headers)
            try:
                await exchange_json(
                    self._http,
                    "DELETE",
                    self.url,
                    timeout_s=timeout_s,
                    limits=self._limits,
                    headers=headers,
                )
            except HttpError as error:
                # Servers may refuse to end sessions (405), or have done so already (404).
                if error.status not in (404, 405):
                    raise

    async def _ensure_open(self, timeout_s: float) -> None:
        """Open the session before a request. On any failure here, the request has not been sent."""
        try:
            await self.open_session(timeout_s)
        except BackendError as error:
            error.delivered = False
            raise

    async def _exchange_messages(
        self, method: str, params: Mapping[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        self._next_id += 1
        own_id = self._next_id
        request = {"jsonrpc": "2.0", "id": own_id, "method": method, "params": params}
        message, headers = await self._send_message(request, timeout_s)
        if isinstance(message, dict) and message.get("id") not in (own_id, None):
            raise BackendError("protocol", f"{method} has another call's answer", delivered=None)
        return parse_result(message, method), headers

    async def _send_message(
        self, message: Mapping[str, Any], timeout_s: float
    ) -> tuple[Any, Mapping[str, str]]:
        return await exchange_json(
            self._http,
            "POST",
            self.url,
            timeout_s=timeout_s,
            limits=self._limits,
            body=message,
            headers=self._headers,
            message_id=cast("int | None", message.get("id")),
        )
