"""Conversion of a call's JSON value to a call, or to an error for the policy."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from flotilla_rollout.dialects.argument_kinds import find_argument_names
from flotilla_rollout.dialects.turns import ParseError, ToolCall
from flotilla_rollout.types import Tool

ARGUMENTS = ("arguments", "params")
# Keys that never hold arguments.
OTHERS = ("name", "tool", "id", "type")
# Characters of the policy's or an environment's names in one message.
MOST_QUOTED = 100

# Part of a name that nobody gave a tool: of JSON, of a tag, or of Python.
_NO_NAME = re.compile(r"""[\s{}\[\]()<>"'=,;]""")


class ToolArguments(NamedTuple):
    """Names of a tool's arguments."""

    required: Collection[str] = ()
    known: Collection[str] = ()


# The arguments of each tool, by its name.
Required = Mapping[str, ToolArguments]


def required_arguments(tools: Sequence[Tool]) -> Required:
    """Return the arguments of each tool."""
    return {tool.name: ToolArguments(_required(tool), find_argument_names(tool)) for tool in tools}


def is_tool_name(name: str, tools: Collection[str]) -> bool:
    """Return True if a text is the name of a tool, or could be one that is not offered.

    Otherwise it is a call in another form."""
    return name in tools or bool(name.isprintable() and name and not _NO_NAME.search(name))


def make_call(value: Any, required: Required) -> ToolCall | ParseError:
    """Make a call of `{"name": ..., "arguments": {...}}`."""
    if not isinstance(value, dict):
        return ParseError('tool call must be a JSON object with "name" and "arguments"')
    name = value.get("name", value.get("tool"))
    if not isinstance(name, str) or not is_tool_name(name, required):
        return ParseError('tool call needs "name", the name of a tool')
    arguments = _arguments(value, name, required.get(name, ToolArguments()))
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

    `raw` is the call as written, in a form whose arguments stand under a key of `known`: arguments
    under another key, which no reader looks at, must not become a call without any."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        renamed = [(ARGUMENTS[0] if key in known else key, each) for key, each in value.items()]
        if len(dict(renamed)) < len(renamed):
            return ParseError(f"tool call has its arguments twice, under {_quoted(value)}")
        made = make_call({"name": name, **dict(renamed)}, required)
        if isinstance(made, ToolCall) and made.arguments_json != "{}":
            return ParseError("tool call is not in the form of this model's calls")
        return made if isinstance(made, ParseError) else None
    demanded = required.get(name, ToolArguments()).required
    if not demanded:
        return None
    return ParseError(f"tool call of {_quoted([name])} needs arguments: {_quoted(demanded)}")


def _arguments(call: dict[str, Any], name: str, tool: ToolArguments) -> dict[str, Any] | ParseError:
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
        others = [
            key
            for key in others
            if key in tool.known or (isinstance(call[key], dict) and not arguments)
        ]
    if others:
        return ParseError(
            f'tool call needs its arguments under "arguments", found {_quoted(others)}'
        )
    if tool.required and not places:
        return ParseError(
            f'tool call of {_quoted([name])} needs "arguments" with {_quoted(tool.required)}'
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
