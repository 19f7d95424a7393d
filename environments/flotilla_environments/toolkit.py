"""Conversion of annotated Python functions to tools: JSON schema, behaviour hints, checked calls.

A tool function takes the database connection first and then its named arguments, each annotated
`Annotated[str, "what it is"]`, or the same with int, float, bool, list[str] or list[int]. An
argument with a default value is optional (`Annotated[str | None, ...] = None`), and null is then
the same as not given. The docstring is the tool's description.
"""

import inspect
import math
import sqlite3
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

_SCHEMAS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    list[str]: {"type": "array", "items": {"type": "string"}},
    list[int]: {"type": "array", "items": {"type": "integer"}},
}
_NOUNS: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list[str]: "a list of strings",
    list[int]: "a list of integers",
}


class ToolError(Exception):
    """A call that the app refuses; the message is what the policy sees."""


@dataclass(frozen=True)
class Picture:
    """A tool's value that is a PNG and not JSON."""

    png: bytes


@dataclass(frozen=True)
class ToolSpec:
    """Description of a tool for clients; the flags are MCP's hints of the same names."""

    name: str
    description: str
    parameters: dict[str, Any]
    read_only: bool
    idempotent: bool
    destructive: bool = False


@dataclass(frozen=True)
class Tool:
    """A tool's specification with the function behind it, and the type of each argument."""

    spec: ToolSpec
    function: Callable[..., Any]
    types: Mapping[str, Any]

    def call(self, db: sqlite3.Connection, arguments: Mapping[str, Any]) -> Any:
        """Call the tool. Raises `ToolError` if the arguments do not fit the schema or the app
        refuses."""
        required = self.spec.parameters["required"]
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None or name in required or name not in self.types
        }
        self._check_arguments(given)
        return self.function(db, **given)

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        missing = [name for name in self.spec.parameters["required"] if name not in arguments]
        if missing:
            raise ToolError(f"missing argument: {', '.join(missing)}")
        unknown = [name for name in arguments if name not in self.types]
        if unknown:
            raise ToolError(f"unknown argument: {', '.join(unknown)}")
        for name, value in arguments.items():
            if not _fits_type(value, self.types[name]):
                raise ToolError(f"{name} must be {_NOUNS[self.types[name]]}")


def _fits_type(value: Any, wanted: Any) -> bool:
    if typing.get_origin(wanted) is list:
        (item_type,) = typing.get_args(wanted)
        return isinstance(value, list) and all(
            _fits_type(item, item_type) for item in cast(list[Any], value)
        )
    # `type is` and not isinstance: True is an int in Python, but not in JSON.
    if type(value) is float:
        return wanted is float and math.isfinite(value)
    return type(value) is (int if wanted is float else wanted) and _is_storable(value)


def _is_storable(value: str | int) -> bool:
    """Check a value for SQLite, which lacks two things that JSON has: integers beyond 64 bits, and
    text with lone surrogates."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not any(0xD800 <= ord(character) < 0xE000 for character in value)


def define_tool(
    function: Callable[..., Any], *, read_only: bool, idempotent: bool, destructive: bool = False
) -> Tool:
    """Describe `function` as a tool. Raises `TypeError` for an annotation it cannot express."""
    hints = typing.get_type_hints(function, include_extras=True)
    kinds: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        base, description = _parse_annotation(function, name, hints.get(name))
        kinds[name] = base
        properties[name] = {**_SCHEMAS[base], "description": description}
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
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
    return Tool(spec, function, kinds)


def _parse_annotation(function: Callable[..., Any], name: str, hint: Any) -> tuple[Any, str]:
    base, *description = typing.get_args(hint) or (None,)
    if isinstance(base, types.UnionType):
        base = next(part for part in typing.get_args(base) if part is not types.NoneType)
    if base not in _SCHEMAS or len(description) != 1:
        raise TypeError(
            f"{function.__name__}({name}): annotate it as Annotated[str, 'description'], or with "
            "int, float, bool, list[str] or list[int] in place of str"
        )
    return base, str(description[0])


def tools_by_name(*tools: Tool) -> dict[str, Tool]:
    return {tool.spec.name: tool for tool in tools}
