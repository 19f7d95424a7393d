"""Turns annotated Python functions into tools: a JSON schema, behaviour hints and checked calls.

A tool function takes the database connection first and then its named arguments, each annotated
`Annotated[str, "what it is"]` or `Annotated[int, ...]`. Its docstring is the tool's description.
"""

import inspect
import sqlite3
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_JSON_TYPES: dict[type, str] = {str: "string", int: "integer"}
_NOUNS: dict[type, str] = {str: "a string", int: "an integer"}


class ToolError(Exception):
    """A call that the app refuses; the message is what the policy sees."""


@dataclass(frozen=True)
class ToolSpec:
    """What a client may know of a tool; the flags are MCP's hints of the same names."""

    name: str
    description: str
    parameters: dict[str, Any]
    read_only: bool
    idempotent: bool
    destructive: bool = False


@dataclass(frozen=True)
class Tool:
    """A tool's specification with the function behind it."""

    spec: ToolSpec
    function: Callable[..., Any]
    types: Mapping[str, type]

    def call(self, db: sqlite3.Connection, arguments: Mapping[str, Any]) -> Any:
        """Raises `ToolError` when the arguments do not fit the schema or the app refuses."""
        self._check(arguments)
        return self.function(db, **arguments)

    def _check(self, arguments: Mapping[str, Any]) -> None:
        missing = [name for name in self.types if name not in arguments]
        if missing:
            raise ToolError(f"missing argument: {', '.join(missing)}")
        unknown = [name for name in arguments if name not in self.types]
        if unknown:
            raise ToolError(f"unknown argument: {', '.join(unknown)}")
        for name, wanted in self.types.items():
            # `type is` and not isinstance: True is an int in Python, but not in JSON.
            if type(arguments[name]) is not wanted or not _storable(arguments[name]):
                raise ToolError(f"{name} must be {_NOUNS[wanted]}")


def _storable(value: str | int) -> bool:
    """JSON also has integers beyond 64 bits and text with lone surrogates; SQLite has neither."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not any(0xD800 <= ord(character) < 0xE000 for character in value)


def tool(
    function: Callable[..., Any], *, read_only: bool, idempotent: bool, destructive: bool = False
) -> Tool:
    """Describe `function` as a tool. Raises `TypeError` for an annotation it cannot express."""
    hints = typing.get_type_hints(function, include_extras=True)
    types: dict[str, type] = {}
    properties: dict[str, Any] = {}
    for name in list(inspect.signature(function).parameters)[1:]:
        base, description = _annotation(function, name, hints.get(name))
        types[name] = base
        properties[name] = {"type": _JSON_TYPES[base], "description": description}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(types),
        "additionalProperties": False,
    }
    spec = ToolSpec(
        name=function.__name__,
        description=inspect.getdoc(function) or "",
        parameters=parameters,
        read_only=read_only,
        idempotent=idempotent,
        destructive=destructive,
    )
    return Tool(spec, function, types)


def _annotation(function: Callable[..., Any], name: str, hint: Any) -> tuple[type, str]:
    parts = typing.get_args(hint)
    if len(parts) != 2 or parts[0] not in _JSON_TYPES:
        raise TypeError(
            f"{function.__name__}({name}): annotate it as Annotated[str, 'description'] or "
            "Annotated[int, 'description']"
        )
    return parts[0], str(parts[1])


def tools_by_name(*tools: Tool) -> dict[str, Tool]:
    return {tool.spec.name: tool for tool in tools}
