"""Translation between FleetTaskEnv's terms and the gateway's. Pure."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.ports import Media, Part, Text, Tool
from flotilla_env_gateway.tools.tool_schemas import dump_schema
from flotilla_env_gateway.tools.tool_selection import SUBMIT_FINAL_ANSWER


def to_task_config(task: Task) -> dict[str, Any]:
    """Translate a task into FleetTaskEnv's vocabulary."""
    return {
        "task_key": task.key,
        "prompt": task.prompt,
        "env_key": task.env_key,
        "env_version": task.env_version or None,
        "data_key": task.data_key or None,
        "data_version": task.data_version or None,
        "env_variables": dict(task.raw_variables) or None,
        "verifier_code": task.verifier,
        "task_modality": task.modality,
    }


def parse_tools(observation: Mapping[str, Any]) -> Sequence[Tool]:
    """Parse the tools of an observation, without the one for the final answer, which the gateway
    provides itself."""
    functions = [tool["function"] for tool in observation["tools"]]
    return [
        Tool(
            function["name"],
            function.get("description") or "",
            dump_schema(function["name"], function.get("parameters") or {}),
        )
        for function in functions
        if function["name"] != SUBMIT_FINAL_ANSWER.name
    ]


def parse_parts(result: Any) -> tuple[Part, ...]:
    """Parse a tool's result, decoded JSON or OpenAI's content parts, into its original parts."""
    if isinstance(result, str):
        return (Text(result),)
    if isinstance(result, dict) and result.keys() == {"error"}:
        return (Text(str(cast("Mapping[str, Any]", result)["error"])),)
    if _is_content(result):
        return tuple(_parse_part(item) for item in result)
    return (Text(json.dumps(result)),)


def _is_content(result: Any) -> bool:
    """Return True for content parts. A result of text only never has this shape, so there must be
    an image among them."""
    if not isinstance(result, list):
        return False
    items = cast("list[Any]", result)
    kinds = {item.get("type") if isinstance(item, dict) else None for item in items}
    return "image_url" in kinds and kinds <= {"image_url", "text"}


def _parse_part(item: Mapping[str, Any]) -> Part:
    if item["type"] == "text":
        return Text(str(item["text"]))
    url = str(item["image_url"]["url"])
    header, _, encoded = url.partition(",")
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError:
        return Text(url)
    mime = header.removeprefix("data:").removesuffix(";base64")
    return Media(data, mime, hashlib.sha256(data).digest(), len(data))
