"""Conversion of a call's JSON value to a call, or to an error for the policy."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from services.rollout.dialects.turns import ParseError, ToolCall
from services.rollout.types import Tool

ARGUMENTS = ("arguments", "params")
# Keys that never hold arguments.
OTHERS = ("name", "tool", "id", "type")
# Characters of the policy's or an environment's names in one message.
MOST_QUOTED = 100

# Names of tools, and the required arguments of each.
Required = Mapping[str, Collection[str]]


def required_arguments(tools: Sequence[Tool]) -> Required:
    """Return the required arguments of each tool."""
    return {tool.name: _required(tool) for tool in tools}


def make_call(value: Any, required: Required) -> ToolCall | ParseError:
    """Make a call of `{"name": ..., "arguments": {...}}`."""
    if not isinstance(value, dict):
        return ParseError('tool call must be a JSON object with "name" and "arguments"')
    name = value.get("name", value.get("tool"))
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        return ParseError('tool call needs "name", the name of a tool')
    arguments = _arguments(value, name, required.get(name, ()))
    if isinstance(arguments, ParseError):
        return arguments
    try:
        return ToolCall(name, json.dumps(arguments, allow_nan=False))
    except RecursionError:
        return ParseError("tool call is nested too deeply")
    except ValueError as error:
        return ParseError(
            f"tool call has arguments that JSON cannot express: {error_reason(error)}"
        )


def check_call_keys(
    raw: str, name: str, required: Required, known: Collection[str] = ()
) -> ParseError | None:
    """Return the fault of a call that was read as one without arguments.

    `raw` is the call as written: arguments under a key outside `known`, which no reader looks at,
    must not become a call without any."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and any(isinstance(value.get(key), dict) for key in known):
        return None
    if isinstance(value, dict):
        made = make_call({"name": name, **value}, required)
        return made if isinstance(made, ParseError) else None
    demanded = required.get(name, ())
    if not demanded:
        return None
    return ParseError(f"tool call of {_quoted([name])} needs arguments: {_quoted(demanded)}")


def _arguments(
    call: dict[str, Any], name: str, required: Collection[str]
) -> dict[str, Any] | ParseError:
    """Return the arguments. None that the policy wrote are dropped silently: a call executed
    without them would teach it something wrong."""
    places = [key for key in ARGUMENTS if key in call]
    if len(places) > 1:
        return ParseError(f"tool call has its arguments twice, under {_quoted(places)}")
    arguments = call[places[0]] if places else {}
    if not isinstance(arguments, dict):
        return ParseError('"arguments" of a tool call must be a JSON object')
    others = [key for key in call if key not in (*ARGUMENTS, *OTHERS)]
    if places:
        others = [key for key in others if isinstance(call[key], dict) and not arguments]
    if others:
        return ParseError(
            f'tool call needs its arguments under "arguments", found {_quoted(others)}'
        )
    if required and not places:
        return ParseError(
            f'tool call of {_quoted([name])} needs "arguments" with {_quoted(required)}'
        )
    return arguments


def _quoted(names: Collection[str]) -> str:
    """Quote names as JSON strings, so that they cannot break the message."""
    return ", ".join(json.dumps(name) for name in names)[:MOST_QUOTED]


def error_reason(error: ValueError) -> str:
    """Return the fault, without its position in the JSON."""
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _required(tool: Tool) -> Collection[str]:
    names = tool.parameters.get("required")
    return [str(name) for name in names] if isinstance(names, list) else []
