"""Tool calls as a person types them: `look {"at": "it"}`, or `look at=it`."""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

_CALL = re.compile(r"(?P<name>[^\s{]+)\s*(?P<rest>.*)", re.DOTALL)
_WORD = re.compile(r"(?P<name>[^={}\s]+)=(?P<value>.*)", re.DOTALL)


class TypedCall(NamedTuple):
    """A call of a tool with its arguments, which are JSON if they were typed as JSON."""

    name: str
    arguments: str


def parse_call(line: str, schemas: Mapping[str, Mapping[str, Any]]) -> TypedCall | None:
    """Return the call of a line; None if it is none. Arguments are a JSON object, which is not
    looked at, or words `NAME=VALUE`, quoted as for a shell: of them a value is text where the
    tool's schema wants text, else JSON if it can be. `schemas` are by the names of tools."""
    match = _CALL.fullmatch(line.strip())
    if match is None:
        return None
    name, rest = match["name"], match["rest"].strip()
    if not rest or (rest.startswith("{") and rest.endswith("}")):
        return TypedCall(name, rest or "{}")
    try:
        words = [_WORD.fullmatch(word) for word in shlex.split(rest)]
    except ValueError:
        return None
    properties = schemas.get(name, {}).get("properties")
    arguments: dict[str, Any] = {}
    for word in words:
        if word is None:
            return None
        known = properties.get(word["name"]) if isinstance(properties, dict) else None
        arguments[word["name"]] = _read_value(word["value"], known)
    return TypedCall(name, json.dumps(arguments, ensure_ascii=False))


def _read_value(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
