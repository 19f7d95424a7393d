"""Tools and tool results in FleetTaskEnv's shapes. Pure."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flotilla_env_gateway.ports import Media, Part, Text

_DROPPED = frozenset({"title", "default", "anyOf"})
_SCREENSHOT = "base64_image"
_NO_SCREENSHOT = "Screenshot capture failed (null image)"


def to_openai_tool(name: str, description: str, input_schema_json: str) -> dict[str, Any]:
    """Convert an MCP tool to OpenAI's `tools` parameter. Definitions outside the properties, and
    references to them, are dropped."""
    schema = json.loads(input_schema_json)
    properties = schema.get("properties") or {}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: normalize_schema(value) for key, value in properties.items()},
                "required": schema.get("required") or [],
            },
        },
    }


def normalize_schema(schema: Any) -> Any:
    """Return a JSON schema without titles, defaults and tuples; alternatives are reduced to the
    first that is not null."""
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    alternatives = [s for s in fields.get("anyOf") or () if s.get("type") != "null"]
    if alternatives:
        fields = {**fields, **alternatives[0]}
    result: dict[str, Any] = {}
    for key, value in fields.items():
        if key == "prefixItems":
            result["items"] = normalize_schema(value[0]) if value else {"type": "string"}
        elif key == "properties" and isinstance(value, dict):
            properties = cast("dict[str, Any]", value)
            result[key] = {name: normalize_schema(inner) for name, inner in properties.items()}
        elif key not in _DROPPED:
            result[key] = normalize_schema(value) if key == "items" else value
    return result


def to_tool_result(parts: Sequence[Part], *, is_error: bool) -> Any:
    """Convert a tool's result: a single text becomes decoded JSON or text; several become a list of
    texts, or of OpenAI content parts if there is an image; an error becomes {"error": text}."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    if is_error:
        return {"error": texts[0] if texts else "Tool execution failed"}
    images = [_to_image_part(part) for part in parts if isinstance(part, Media)]
    if images:
        return [*({"type": "text", "text": text} for text in texts), *images]
    return _decode_result(texts[0]) if len(texts) == 1 else texts


def find_tool_error(result: Any) -> str | None:
    """Find the error message of a result, in any of the forms that tools use."""
    if not isinstance(result, dict):
        return None
    fields = cast("Mapping[str, Any]", result)
    if fields.get("error"):
        return str(fields["error"])
    for key, sign, default in (
        ("status", fields.get("status") == "failed", "status=failed"),
        ("isError", bool(fields.get("isError")), "isError=true"),
    ):
        if key in fields and sign:
            return str(fields.get("message") or default)
    return None


def _decode_result(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or _SCREENSHOT not in value:
        return cast("Any", value)
    url = cast("Mapping[str, Any]", value)[_SCREENSHOT]
    return [_to_url_part(str(url))] if url else _NO_SCREENSHOT


def _to_image_part(media: Media) -> dict[str, Any]:
    mime = media.mime or "image/png"
    return _to_url_part(f"data:{mime};base64,{base64.b64encode(media.data).decode()}")


def _to_url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
