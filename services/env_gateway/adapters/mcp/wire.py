"""MCP's messages in the gateway's terms, for any transport."""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from services.common.parsing import as_object
from services.env_gateway.ports import BackendError, CallResult, Part, Text, Tool
from services.env_gateway.tools.computer_tool import make_media

PROTOCOL_VERSION = "2025-06-18"
INITIALIZE: Mapping[str, Any] = {
    "protocolVersion": PROTOCOL_VERSION,
    "capabilities": {},
    "clientInfo": {"name": "flotilla-env-gateway", "version": "0.1"},
}
INITIALIZED: Mapping[str, Any] = {"jsonrpc": "2.0", "method": "notifications/initialized"}
T = TypeVar("T")

_NOT_DISPATCHED = {-32700, -32600, -32601, -32602}
_INVALID_PARAMS = -32602


def parse_result(message: Any, method: str) -> dict[str, Any]:
    """Parse the result of a message. Raises BackendError for an error or a malformed message."""
    fields = as_object(message)
    if not fields.keys() & {"result", "error"} or not isinstance(fields.get("result") or {}, dict):
        raise BackendError("protocol", f"{method} was answered by no message", delivered=None)
    if error := fields.get("error"):
        code, detail = _parse_answer(method, lambda: (error.get("code"), error.get("message", "")))
        raise BackendError(
            "jsonrpc",
            f"{code}: {detail}",
            delivered=False if code in _NOT_DISPATCHED else None,
            invalid=code in _NOT_DISPATCHED,
            bad_arguments=code == _INVALID_PARAMS,
        )
    return fields.get("result") or {}


def parse_call_result(result: Mapping[str, Any]) -> CallResult:
    """Parse the result of a tool call. Raises BackendError, as all functions here do, for an answer
    that violates MCP."""
    parts = _parse_answer("tools/call", lambda: parse_parts(result))
    return CallResult(parts, is_error=bool(result.get("isError")))


def parse_tools(result: Mapping[str, Any]) -> list[Tool]:
    return _parse_answer(
        "tools/list", lambda: [_parse_tool(item) for item in result.get("tools", [])]
    )


def _parse_answer(method: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        message = f"the answer to {method} is not as MCP has it: {error!r}"
        raise BackendError("protocol", message[:500], delivered=None) from error


def _parse_tool(item: Mapping[str, Any]) -> Tool:
    hints = item.get("annotations") or {}
    return Tool(
        name=_require_text(item["name"]),
        description=_require_text(item.get("description") or ""),
        input_schema_json=json.dumps(item.get("inputSchema") or {"type": "object"}),
        read_only=hints.get("readOnlyHint") is True,
        idempotent=hints.get("idempotentHint") is True,
    )


def parse_parts(result: Mapping[str, Any]) -> tuple[Part, ...]:
    """Parse the content of a tool's result; structured content only if there is no other."""
    content = result.get("content") or []
    if not content and result.get("structuredContent") is not None:
        return (Text(json.dumps(result["structuredContent"])),)
    return tuple(_parse_part(item) for item in content)


def _parse_part(item: Mapping[str, Any]) -> Part:
    resource = item.get("resource") or {}
    encoded = item.get("data") or resource.get("blob")
    if encoded is None:
        return Text(
            _require_text(item.get("text") or resource.get("text") or item.get("uri") or "")
        )
    mime = _require_text(
        item.get("mimeType") or resource.get("mimeType") or "application/octet-stream"
    )
    try:
        data = base64.b64decode(encoded, validate=True)
    except (ValueError, TypeError):
        return Text(f"(a part of type {mime} that is not base64)")
    return make_media(data, mime)


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text is expected")
    return value
