"""MCP's messages in the gateway's words, whatever carries them."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from services.env_gateway.computer import media
from services.env_gateway.ports import BackendError, CallResult, Part, Text, Tool

PROTOCOL_VERSION = "2025-06-18"
INITIALIZE: Mapping[str, Any] = {
    "protocolVersion": PROTOCOL_VERSION,
    "capabilities": {},
    "clientInfo": {"name": "flotilla-env-gateway", "version": "0.1"},
}
INITIALIZED: Mapping[str, Any] = {"jsonrpc": "2.0", "method": "notifications/initialized"}
_NOT_DISPATCHED = {-32700, -32600, -32601, -32602}
_INVALID_PARAMS = -32602


def result_of(message: Any, method: str) -> dict[str, Any]:
    """The result that a message brings. Raises BackendError for an error, or no message at all."""
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
    return message.get("result") or {}


def call_result(result: Mapping[str, Any]) -> CallResult:
    return CallResult(parts_of(result), is_error=bool(result.get("isError")))


def tool_of(item: Mapping[str, Any]) -> Tool:
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
    return media(data, mime)
