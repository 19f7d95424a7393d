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

from services.env_gateway.ports import BackendError, CallResult, Media, Part, Text, Tool

PROTOCOL_VERSION = "2025-06-18"
_HEADERS = {
    "accept": "application/json, text/event-stream",
    "content-type": "application/json",
}
_NOT_DISPATCHED = {-32700, -32600, -32601, -32602}
_INVALID_PARAMS = -32602
_PNG = b"\x89PNG\r\n\x1a\n"


def http_session(*, max_connections: int, headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """A pool for one server. Idle connections are dropped before common servers (5 s) do it, or a
    request could meet a connection that is just being closed."""
    connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=4.0)
    return aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=True)


class HttpError(BackendError):
    """An answer with an HTTP status of 400 or more."""

    def __init__(self, status: int, body: str, retry_after_s: float | None) -> None:
        kind = {404: "not_found", 429: "throttled", 413: "too_large", 401: "auth", 403: "auth"}
        super().__init__(
            kind.get(status, "http"),
            f"HTTP {status}: {body[:500]}",
            # 500, 502 and 504 may come after the request was executed; the others are refusals.
            delivered=None if status >= 500 and status != 503 else False,
            retry_after_s=retry_after_s,
            invalid=status in (400, 401, 405, 413, 422),
        )
        self.status = status
        self.body = body


async def send(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeout_s: float,
    max_bytes: int,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    message_id: int | None = None,
) -> tuple[Any, Mapping[str, str]]:
    """One HTTP exchange of JSON; an SSE answer is read up to the message with `message_id`.

    Raises HttpError, and BackendError for whatever happens to the connection.
    """
    data = None if body is None else json.dumps(body).encode()
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with http.request(method, url, data=data, headers=headers, timeout=timeout) as answer:
            if answer.status >= 400:
                text = (await answer.content.read(4000)).decode("utf-8", "replace")
                raise HttpError(answer.status, text, _retry_after(answer.headers))
            if answer.content_type == "text/event-stream":
                return await _read_sse(answer, message_id, max_bytes), answer.headers
            content = await _read(answer, max_bytes)
            return (json.loads(content) if content else None), answer.headers
    except TimeoutError:
        raise BackendError("timeout", f"no answer in {timeout_s:.1f} s", delivered=None) from None
    except aiohttp.ClientConnectorError as error:
        raise BackendError("connect", str(error), delivered=False) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        message = f"{type(error).__name__}: {error}"
        raise BackendError("connection", message, delivered=None) from error
    except ValueError as error:
        raise BackendError(
            "protocol", f"the answer is not JSON: {error}", delivered=None
        ) from error


async def _read(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        _check_size(len(content), max_bytes)
    return bytes(content)


def _check_size(size: int, max_bytes: int) -> None:
    """Raises BackendError; another attempt would only bring as much again."""
    if size > max_bytes:
        message = f"the answer exceeds {max_bytes} bytes"
        raise BackendError("too_large", message, delivered=None, invalid=True)


async def _read_sse(answer: aiohttp.ClientResponse, message_id: int | None, max_bytes: int) -> Any:
    rest = b""
    data: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        _check_size(size, max_bytes)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if message := _sse_line(line.rstrip(b"\r"), data, message_id):
                return message
    raise BackendError("stream_cut", "the stream ended without an answer", delivered=None)


def _sse_line(line: bytes, data: list[bytes], message_id: int | None) -> dict[str, Any] | None:
    """Take in one line of a stream; the awaited message, once a blank line completes it."""
    if line.startswith(b"data:"):
        data.append(line[5:].strip())
    if line or not data:
        return None
    message = json.loads(b"\n".join(data))
    data.clear()
    answers = isinstance(message, dict) and ("result" in message or "error" in message)
    if not answers or message.get("id") != message_id:
        return None
    return cast("dict[str, Any]", message)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


class McpSession:
    """One session with an MCP server. Usable concurrently; opened on first use, and anew when the
    server has forgotten it."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, max_bytes: int) -> None:
        self._http = http
        self._url = url
        self._max_bytes = max_bytes
        self._headers = dict(_HEADERS)
        self._open = False
        self._next_id = 0
        self._opening = asyncio.Lock()

    async def open(self, timeout_s: float) -> None:
        """Shows that the server is ready. Raises BackendError."""
        async with self._opening:
            if self._open:
                return
            self._headers = dict(_HEADERS)
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
            headers, self._headers = self._headers, dict(_HEADERS)
            try:
                await send(
                    self._http,
                    "DELETE",
                    self._url,
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
            self._url,
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
