"""MCP's messages in the gateway's terms, for any transport."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mcp_types import METHOD_NOT_FOUND

from flotilla_env_gateway.ports import BackendError, CallResult, Part, Text, Tool
from flotilla_env_gateway.tools.computer_tool import NO_PICTURE, make_media
from flotilla_env_gateway.tools.tool_schemas import dump_schema

T = TypeVar("T")

# Characters shown of an error's message.
_ERROR_CHARS = 4000
_MARK = "… [{} more characters were cut]"


def cut_error(text: str) -> str:
    """Return an error's message, cut with a mark if it is very long."""
    cut = len(text) - _ERROR_CHARS
    return f"{text[:_ERROR_CHARS]}{_MARK.format(cut)}" if cut > 0 else text


def too_large_result(error: BackendError) -> CallResult:
    """Return what the policy reads instead of an answer that is too large to be read."""
    return CallResult((Text(f"[the tool's answer was dropped: {error}]"),), is_error=True)


def parse_call_result(result: Mapping[str, Any]) -> CallResult:
    """Parse the result of a tool call. Raises BackendError for an answer that violates MCP."""
    asks = result.get("resultType") == "input_required"
    read = _refuse_input if asks else parse_parts
    parts = _parse_answer("tools/call", lambda: read(result), delivered=None)
    return CallResult(parts, is_error=asks or bool(result.get("isError")))


def _refuse_input(result: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return what the policy reads of a call that the server wants to ask its client about."""
    asked = {_require_text(each["method"]) for each in (result.get("inputRequests") or {}).values()}
    named = ", ".join(sorted(asked)) or "another round"
    return (Text(cut_error(f"{METHOD_NOT_FOUND}: {named} is not offered here")),)


def parse_tools(result: Mapping[str, Any]) -> list[Tool]:
    """Parse a page of tools. Raises BackendError, which is final, and names the tool at fault."""
    listed = lambda: [_parse_tool(item) for item in result.get("tools", [])]  # noqa: E731
    return _parse_answer("tools/list", listed, delivered=False)


def _parse_answer(method: str, read: Callable[[], T], *, delivered: bool | None) -> T:
    try:
        return read()
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        message = f"the answer to {method} is not as MCP has it: {error!r}"
        final = delivered is False
        raise BackendError("protocol", message[:500], delivered=delivered, invalid=final) from error


def _parse_tool(item: Mapping[str, Any]) -> Tool:
    hints = item.get("annotations") or {}
    name = _require_text(item["name"])
    if not name:
        raise TypeError("a tool has an empty name")
    return Tool(
        name=name,
        description=_require_text(item.get("description") or ""),
        input_schema_json=dump_schema(name, item.get("inputSchema", {})),
        read_only=hints.get("readOnlyHint") is True,
        idempotent=hints.get("idempotentHint") is True,
    )


def parse_parts(result: Mapping[str, Any]) -> tuple[Part, ...]:
    """Parse the content of a tool's result, a part for each item. Structured content is a part of
    its own, unless the text repeats it, as MCP recommends."""
    parts = tuple(_parse_part(item) for item in result.get("content") or [])
    structured = result.get("structuredContent")
    if structured is None or _repeats(parts, structured):
        return parts
    return (*parts, Text(json.dumps(structured)))


def _repeats(parts: Sequence[Part], structured: Any) -> bool:
    """Return True if the texts are the structured content, as JSON or as servers wrap it: the one
    value of an object such as {"result": ...}, the items of a list in a text each."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    values = [_load_or_keep(text) for text in texts]
    found: list[Any] = [values, *values, texts, *texts]
    whole = [structured]
    if isinstance(structured, dict) and len(structured) == 1:
        whole += structured.values()
    return bool(texts) and any(one == other for one in whole for other in found)


def _load_or_keep(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parse_part(item: Mapping[str, Any]) -> Part:
    resource = item.get("resource") or {}
    encoded = item.get("data") or resource.get("blob")
    if not encoded and item.get("type") == "image":
        return Text(NO_PICTURE)
    if encoded is None:
        return Text(_describe_part(item, resource))
    mime = _require_text(
        item.get("mimeType") or resource.get("mimeType") or "application/octet-stream"
    )
    try:
        data = base64.b64decode(encoded, validate=True)
    except (ValueError, TypeError):
        return Text(f"(a part of type {mime} that is not base64)")
    return make_media(data, mime)


def _describe_part(item: Mapping[str, Any], resource: Mapping[str, Any]) -> str:
    """Return the text of an item, or a line with all that a link or an unknown kind says."""
    text = item.get("text", resource.get("text"))
    if text is not None:
        return _require_text(text)
    told = {**item, **resource}
    kind = str(told.pop("type", "part")).replace("_", " ")
    told = {name: value for name, value in told.items() if isinstance(value, str | int | float)}
    return f"({kind}: {', '.join(f'{name} {value}' for name, value in told.items())})"


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text is expected")
    return value
