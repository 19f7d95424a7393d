"""OpenEnv's observations and schemas in the gateway's terms. Pure."""

import base64
import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from flotilla_common.text.parsing import as_object
from flotilla_env_gateway.adapters.mcp.wire import parse_parts
from flotilla_env_gateway.ports import BackendError, CallResult, Part, Text, Tool
from flotilla_env_gateway.tools.computer_tool import make_media
from flotilla_env_gateway.tools.tool_schemas import dump_schema
from flotilla_env_gateway.verify.check_report import Returned, split_report

_TOOL_ACTIONS = ("call_tool", "list_tools")
_DATA_URL = re.compile(r"data:(?P<mime>image/[\w.+-]+);base64,")
_IMAGE_TYPES = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"))
# The server gave up on a tool that may still be running: its effect is unknown.
_UNKNOWN_OUTCOMES = ("timeout", "transport_error")


def takes_tool_calls(action: Mapping[str, Any]) -> bool:
    """Return True if actions of this schema are tool calls. An action without its own fields is the
    base class, through which servers accept the tool calls of MCP environments."""
    properties = _get_properties(action)
    kind = as_object(properties.get("type"))
    kinds = [kind.get("const"), kind.get("default"), *_as_list(kind.get("enum"))]
    return any(action in kinds for action in _TOOL_ACTIONS) or not properties


def make_step_tool(name: str, action: Mapping[str, Any]) -> Tool:
    """Build the tool whose arguments are the action itself."""
    schema = {**action, "type": "object", "properties": _get_properties(action)}
    return Tool(name, str(action.get("description") or "Act."), json.dumps(schema))


def parse_tools(data: Mapping[str, Any], read_only: Collection[str]) -> list[Tool]:
    """Parse the list of tools. Raises BackendError if it is empty, with the server's reason."""
    items = [as_object(item) for item in _as_list(_get_observation(data).get("tools"))]
    metadata = _get_metadata(data)
    if not items:
        detail = metadata.get("error") or "it has none"
        raise BackendError("no_tools", f"the environment lists no tools: {detail}", delivered=False)
    hints = as_object(metadata.get("annotations"))
    return [_parse_tool(item, hints, read_only) for item in items]


def parse_call_result(data: Mapping[str, Any], image_fields: Collection[str]) -> CallResult:
    """Parse the result of a call. Raises BackendError if the server does not know whether the call
    was executed."""
    observation = _get_observation(data)
    reward, done = parse_reward(data), data.get("done") is True
    if reward is not None and not math.isfinite(reward):
        reward = None
    error = as_object(observation.get("error"))
    if (kind := error.get("error_type")) is not None:
        message = str(error.get("message") or kind)
        if kind in _UNKNOWN_OUTCOMES:
            raise BackendError(str(kind), message, delivered=None)
        return CallResult((Text(message),), is_error=True, reward=reward, done=done)
    parts, is_error = _parse_outcome(observation, image_fields)
    return CallResult(parts, is_error=is_error, reward=reward, done=done)


def parse_observation(
    data: Mapping[str, Any], fields: Collection[str] | None, image_fields: Collection[str]
) -> tuple[Part, ...]:
    """Parse an observation, or its `fields`, as JSON text followed by its images."""
    observation = _get_observation(data)
    chosen = {
        name: value
        for name, value in observation.items()
        if (fields is None or name in fields) and not (name == "metadata" and not value)
    }
    images: list[Part] = []
    for name in list(chosen):
        if (image := _parse_image(chosen[name], wanted=name in image_fields)) is not None:
            images.append(image)
            del chosen[name]
    return (*((Text(json.dumps(chosen)),) if chosen else ()), *images)


def parse_reward(data: Mapping[str, Any]) -> float | None:
    """Parse the reward: None if there is none, and NaN if it is not a number, so that an earlier
    reward is not used instead."""
    value = data.get("reward")
    if value is None:
        return None
    try:
        return float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        return math.nan


def parse_stdout(data: Mapping[str, Any]) -> str:
    """Return the output of a verifier behind the reward, if the environment passes it on."""
    return str(_get_metadata(data).get("stdout") or "")


def parse_report(data: Mapping[str, Any]) -> Returned:
    """Return checks and named rewards of a verifier behind the reward, if the environment passes
    them on."""
    return split_report({"score": None, **_get_metadata(data)})


def _get_observation(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(data.get("observation"), dict):
        raise BackendError("protocol", "an answer holds no observation", delivered=None)
    return as_object(data["observation"])


def _get_metadata(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata. Version 0.10 sends it twice, 0.3 not at all."""
    return as_object(data.get("metadata") or _get_observation(data).get("metadata"))


def _parse_outcome(
    observation: Mapping[str, Any], image_fields: Collection[str]
) -> tuple[tuple[Part, ...], bool]:
    """Return (the parts to show, True if they are an error)."""
    if "tool_name" not in observation or "result" not in observation:
        return parse_observation({"observation": observation}, None, image_fields), False
    result = observation["result"]
    answer = as_object(result)
    if isinstance(answer.get("content"), list):
        structured = answer.get("structured_content", answer.get("structuredContent"))
        content = [_to_mcp_spelling(as_object(item)) for item in _as_list(answer["content"])]
        parts = parse_parts({"content": content, "structuredContent": structured})
        return parts, bool(answer.get("is_error") or answer.get("isError"))
    return (Text(result if isinstance(result, str) else json.dumps(result)),), False


def _to_mcp_spelling(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Restore the protocol's spelling: servers on mcp 2.x write `mime_type` for `mimeType`."""
    resource = as_object(item.get("resource"))
    if "mime_type" in resource:
        resource = {**resource, "mimeType": resource["mime_type"]}
    return {**item, "mimeType": item.get("mimeType", item.get("mime_type")), "resource": resource}


def _parse_tool(
    item: Mapping[str, Any], hints: Mapping[str, Any], read_only: Collection[str]
) -> Tool:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise BackendError("protocol", "a tool is listed without its name", delivered=None)
    # 0.3 on mcp 2.x lists tools without their schemas.
    schema = as_object(item.get("input_schema")) or as_object(item.get("inputSchema"))
    own = as_object(hints.get(name))
    return Tool(
        name,
        str(item.get("description") or ""),
        dump_schema(name, schema),
        read_only=name in read_only or own.get("readOnlyHint") is True,
        idempotent=own.get("idempotentHint") is True,
    )


def _get_properties(action: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of an action without `metadata`, which every action has and no policy
    should write."""
    properties = as_object(action.get("properties"))
    return {name: schema for name, schema in properties.items() if name != "metadata"}


def _parse_image(value: object, *, wanted: bool) -> Part | None:
    if not isinstance(value, str):
        return None
    match = _DATA_URL.match(value)
    if match is None and not wanted:
        return None
    try:
        content = base64.b64decode(value[match.end() if match else 0 :], validate=True)
    except ValueError:
        return Text("(an image that is not base64)")
    if match is not None:
        return make_media(content, match["mime"])
    found = (mime for magic, mime in _IMAGE_TYPES if content.startswith(magic))
    return make_media(content, next(found, "application/octet-stream"))


def _as_list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
