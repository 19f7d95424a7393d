"""A thin MCP client over streamable HTTP: pooled connections, one session per environment.

An SDK session per call costs a hundred times the CPU and hides HTTP status and Retry-After, which
the retry rule needs; so this speaks the wire itself, both JSON and SSE answers.
"""

import asyncio
import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

import aiohttp

from services.env_gateway.adapters.http_client import MAX_BYTES, HttpError, send
from services.env_gateway.ports import BackendError, CallResult, Media, Part, Text, Tool

PROTOCOL_VERSION = "2025-06-18"
_HEADERS = {
    "accept": "application/json, text/event-stream",
    "content-type": "application/json",
}
_NOT_DISPATCHED = {-32700, -32600, -32601, -32602}
_INVALID_PARAMS = -32602
_PNG = b"\x89PNG\r\n\x1a\n"


class McpSession:
    """One session with an MCP server. Usable concurrently; opened on first use, and anew when the
    server has forgotten it."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`headers` go with every request, besides the pool's own."""
        self.url = url
        self._http = http
        self._max_bytes = max_bytes
        self._base_headers = {**_HEADERS, **(headers or {})}
        self._headers = dict(self._base_headers)
        self._open = False
        self._next_id = 0
        self._opening = asyncio.Lock()

    async def open(self, timeout_s: float) -> None:
        """Shows that the server is ready. Raises BackendError."""
        async with self._opening:
            if self._open:
                return
            self._headers = dict(self._base_headers)
            params = {
                "protocolVersion": PROTOCOL_VERSION,
                "capabilities": {},
                "clientInfo": {"name": "flotilla-env-gateway", "version": "0.1"},
            }
            result, headers = await self._exchange("initialize", params, timeout_s)
            self._headers["mcp-protocol-version"] = result.get("protocolVersion", PROTOCOL_VERSION)
            if session_id := headers.get("mcp-session-id"):
                self._headers["mcp-session-id"] = session_id
                # A server that gave no session id keeps nothing that this could change.
                initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
                await self._send(initialized, timeout_s)
            self._open = True

    async def list_tools(self, timeout_s: float) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        while True:
            params = {"cursor": cursor} if cursor else {}
            result = await self.request("tools/list", params, timeout_s)
            tools += [_tool(item) for item in result.get("tools", [])]
            cursor = result.get("nextCursor")
            if not cursor:
                return tools

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> CallResult:
        params = {"name": name, "arguments": arguments}
        result = await self.request("tools/call", params, timeout_s)
        return CallResult(parts_of(result), is_error=bool(result.get("isError")))

    async def request(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        """Raises BackendError; `lost` when the server knows neither the session nor a new one."""
        until = asyncio.get_running_loop().time() + timeout_s
        for attempt in range(2):
            try:
                await self.open(timeout_s)
                return (await self._exchange(method, params, timeout_s))[0]
            except HttpError as error:
                if error.status != 404:
                    raise
                # Refused before dispatch: the server has forgotten the session, or is gone.
                if attempt or not self._open:
                    message = f"the environment is gone: {error}"
                    raise BackendError("lost", message, delivered=False, lost=True) from error
                self._open = False
                timeout_s = max(0.001, until - asyncio.get_running_loop().time())
        raise AssertionError("the second attempt returns or raises")

    async def close(self, timeout_s: float) -> None:
        """Tell the server to forget the session, if it gave one. Raises BackendError."""
        self._open = False
        if "mcp-session-id" in self._headers:
            headers, self._headers = self._headers, dict(self._base_headers)
            try:
                await send(
                    self._http,
                    "DELETE",
                    self.url,
                    timeout_s=timeout_s,
                    max_bytes=self._max_bytes,
                    headers=headers,
                )
            except HttpError as error:
                # Servers may refuse to end sessions (405), or have done so already (404).
                if error.status not in (404, 405):
                    raise

    async def _exchange(
        self, method: str, params: Mapping[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        self._next_id += 1
        request = {"jsonrpc": "2.0", "id": self._next_id, "method": method, "params": params}
        message, headers = await self._send(request, timeout_s)
        if not isinstance(message, dict):
            raise BackendError("protocol", f"{method} was answered by no message", delivered=None)
        if error := message.get("error"):
            code = error.get("code")
            raise BackendError(
                "jsonrpc",
                f"{code}: {error.get('message', '')}",
                delivered=False if code in _NOT_DISPATCHED else None,
                invalid=code in _NOT_DISPATCHED,
                bad_arguments=code == _INVALID_PARAMS,
            )
        return message.get("result") or {}, headers

    async def _send(
        self, message: Mapping[str, Any], timeout_s: float
    ) -> tuple[Any, Mapping[str, str]]:
        return await send(
            self._http,
            "POST",
            self.url,
            timeout_s=timeout_s,
            max_bytes=self._max_bytes,
            body=message,
            headers=self._headers,
            message_id=cast("int | None", message.get("id")),
        )


def _tool(item: Mapping[str, Any]) -> Tool:
    hints = item.get("annotations") or {}
    return Tool(
        name=item["name"],
        description=item.get("description") or "",
        input_schema_json=json.dumps(item.get("inputSchema") or {"type": "object"}),
        read_only=hints.get("readOnlyHint") is True,
        idempotent=hints.get("idempotentHint") is True,
    )


def parts_of(result: Mapping[str, Any]) -> tuple[Part, ...]:
    """The content of a tool's result; structured content only where there is no other."""
    content = result.get("content") or []
    if not content and result.get("structuredContent") is not None:
        return (Text(json.dumps(result["structuredContent"])),)
    return tuple(_part(item) for item in content)


def _part(item: Mapping[str, Any]) -> Part:
    resource = item.get("resource") or {}
    encoded = item.get("data") or resource.get("blob")
    if encoded is None:
        return Text(item.get("text") or resource.get("text") or item.get("uri") or "")
    mime = item.get("mimeType") or resource.get("mimeType") or "application/octet-stream"
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError, TypeError):
        return Text(f"(a part of type {mime} that is not base64)")
    width, height = _png_size(data)
    return Media(data, mime, hashlib.sha256(data).digest(), len(data), width, height)


def _png_size(data: bytes) -> tuple[int, int]:
    if not data.startswith(_PNG) or len(data) < 24:
        return 0, 0
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
