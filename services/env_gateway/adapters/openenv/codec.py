"""What OpenEnv's observations and schemas say, in the gateway's words. Pure."""

import base64
import binascii
import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from services.env_gateway.adapters.mcp.wire import parts_of
from services.env_gateway.grading.verdict import reported
from services.env_gateway.ports import BackendError, CallResult, Part, Report, Text, Tool
from services.env_gateway.tools.computer_tool import media

_TOOL_ACTIONS = ("call_tool", "list_tools")
_DATA_URL = re.compile(r"data:(?P<mime>image/[\w.+-]+);base64,")
_IMAGE_TYPES = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"))
# The server gave up on a tool that may go on: nobody knows what it has done.
_UNKNOWN_OUTCOMES = ("timeout", "transport_error")


def takes_tool_calls(action: Mapping[str, Any]) -> bool:
    """Whether actions of this schema are tool calls; an action with no fields of its own is the
    base class, by which servers take the tool calls of MCP environments."""
    properties = _properties(action)
    kind = _object(properties.get("type"))
    kinds = [kind.get("const"), kind.get("default"), *_list(kind.get("enum"))]
    return any(action in kinds for action in _TOOL_ACTIONS) or not properties


def step_tool(name: str, action: Mapping[str, Any]) -> Tool:
    """The tool whose arguments are the action itself."""
    schema = {**action, "type": "object", "properties": _properties(action)}
    return Tool(name, str(action.get("description") or "Act."), json.dumps(schema))


def listed_tools(data: Mapping[str, Any], read_only: Collection[str]) -> list[Tool]:
    """Raises BackendError when there is none, saying what the server says of it."""
    items = [_object(item) for item in _list(_observation(data).get("tools"))]
    metadata = _metadata(data)
    if not items:
        detail = metadata.get("error") or "it has none"
        raise BackendError("no_tools", f"the environment lists no tools: {detail}", delivered=False)
    hints = _object(metadata.get("annotations"))
    return [_tool(item, hints, read_only) for item in items]


def call_result(data: Mapping[str, Any], image_fields: Collection[str]) -> CallResult:
    """Raises BackendError for a call of which the server does not know whether it was executed."""
    observation = _observation(data)
    reward, done = reward_of(data), data.get("done") is True
    if reward is not None and not math.isfinite(reward):
        reward = None
    error = _object(observation.get("error"))
    if (kind := error.get("error_type")) is not None:
        message = str(error.get("message") or kind)
        if kind in _UNKNOWN_OUTCOMES:
            raise BackendError(str(kind), message, delivered=None)
        return CallResult((Text(message),), is_error=True, reward=reward, done=done)
    parts, is_error = _outcome(observation, image_fields)
    return CallResult(parts, is_error=is_error, reward=reward, done=done)


def observed(
    data: Mapping[str, Any], fields: Collection[str] | None, image_fields: Collection[str]
) -> tuple[Part, ...]:
    """An observation, or those of its `fields`, as JSON text followed by its images."""
    observation = _observation(data)
    chosen = {
        name: value
        for name, value in observation.items()
        if (fields is None or name in fields) and not (name == "metadata" and not value)
    }
    images: list[Part] = []
    for name in list(chosen):
        if (image := _image(chosen[name], wanted=name in image_fields)) is not None:
            images.append(image)
            del chosen[name]
    return (*((Text(json.dumps(chosen)),) if chosen else ()), *images)


def reward_of(data: Mapping[str, Any]) -> float | None:
    """None where none is given, and NaN for what is no number: an earlier one must not stand in."""
    value = data.get("reward")
    if value is None:
        return None
    try:
        return float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        return math.nan


def printed(data: Mapping[str, Any]) -> str:
    """What a verifier behind the reward printed, where the environment passes that on."""
    return str(_metadata(data).get("stdout") or "")


def report(data: Mapping[str, Any]) -> Report | None:
    """The checks of a verifier behind the reward, where the environment passes these on."""
    return reported({"score": None, **_metadata(data)})[1]


def _observation(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(data.get("observation"), dict):
        raise BackendError("protocol", "an answer holds no observation", delivered=None)
    return _object(data["observation"])


def _metadata(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Version 0.10 sends it twice, 0.3 not at all."""
    return _object(data.get("metadata") or _observation(data).get("metadata"))


def _outcome(
    observation: Mapping[str, Any], image_fields: Collection[str]
) -> tuple[tuple[Part, ...], bool]:
    """(what is shown, whether it is an error)"""
    if "tool_name" not in observation or "result" not in observation:
        return observed({"observation": observation}, None, image_fields), False
    result = observation["result"]
    answer = _object(result)
    if isinstance(answer.get("content"), list):
        structured = answer.get("structured_content", answer.get("structuredContent"))
        content = [_mcp_spelling(_object(item)) for item in _list(answer["content"])]
        parts = parts_of({"content": content, "structuredContent": structured})
        return parts, bool(answer.get("is_error") or answer.get("isError"))
    return (Text(result if isinstance(result, str) else json.dumps(result)),), False


def _mcp_spelling(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Servers on mcp 2.x write `mime_type` where the protocol has `mimeType`."""
    resource = _object(item.get("resource"))
    if "mime_type" in resource:
        resource = {**resource, "mimeType": resource["mime_type"]}
    return {**item, "mimeType": item.get("mimeType", item.get("mime_type")), "resource": resource}


def _tool(item: Mapping[str, Any], hints: Mapping[str, Any], read_only: Collection[str]) -> Tool:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise BackendError("protocol", "a tool is listed without its name", delivered=None)
    # 0.3 on mcp 2.x lists tools without their schemas.
    schema = _object(item.get("input_schema")) or _object(item.get("inputSchema"))
    own = _object(hints.get(name))
    return Tool(
        name,
        str(item.get("description") or ""),
        json.dumps(schema or {"type": "object"}),
        read_only=name in read_only or own.get("readOnlyHint") is True,
        idempotent=own.get("idempotentHint") is True,
    )


def _properties(action: Mapping[str, Any]) -> dict[str, Any]:
    """Without `metadata`, which every action has and no policy is to write."""
    properties = _object(action.get("properties"))
    return {name: schema for name, schema in properties.items() if name != "metadata"}


def _image(value: object, *, wanted: bool) -> Part | None:
    if not isinstance(value, str):
        return None
    match = _DATA_URL.match(value)
    if match is None and not wanted:
        return None
    try:
        content = base64.b64decode(value[match.end() if match else 0 :], validate=True)
    except (binascii.Error, ValueError):
        return Text("(an image that is not base64)")
    if match is not None:
        return media(content, match["mime"])
    found = (mime for magic, mime in _IMAGE_TYPES if content.startswith(magic))
    return media(content, next(found, "application/octet-stream"))


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
