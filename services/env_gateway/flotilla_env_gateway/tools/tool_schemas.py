"""JSON schemas of tools' arguments, checked before a policy is offered the tools. Pure."""

import json
from typing import Any, cast

from flotilla_env_gateway.ports import BackendError

_NAME_CHARACTERS = 100
# What they hold: schemas by name, a list of schemas, one schema, and a list of anything.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")
_LISTS = (*_ALTERNATIVES, "enum", "required")


def dump_schema(tool_name: str, schema: Any) -> str:
    """Return the JSON of a tool's schema. Raises BackendError, which is final and names the tool,
    for one that those who read it downstream could not."""
    fault = _find_fault(schema) if isinstance(schema, dict) else "is no object"
    if fault:
        message = f"the schema of the tool {tool_name[:_NAME_CHARACTERS]!r} {fault}"
        raise BackendError("protocol", message, delivered=False, invalid=True)
    return json.dumps(schema or {"type": "object"})


def _find_fault(schema: Any) -> str:
    """Return what is wrong with a schema or one within it; "" if nothing is. Null is as good as
    absent."""
    if not isinstance(schema, dict):
        return "" if isinstance(schema, bool) else f"has {_show(schema)} in place of a schema"
    items = cast("dict[str, Any]", schema).items()
    fields = {key: value for key, value in items if value is not None}
    kinds = fields.get("type", [])
    names = cast("list[Any]", kinds) if isinstance(kinds, list) else [kinds]
    if not all(isinstance(name, str) for name in names):
        return f"has the type {_show(kinds)}"
    for expected, keys in ((dict, _BY_NAME), (list, _LISTS)):
        for key in keys:
            if not isinstance(fields.get(key, expected()), expected):
                return f"has {key} {_show(fields[key])}"
    inner = [each for key in _BY_NAME for each in fields.get(key, {}).values()]
    inner += [each for key in _ALTERNATIVES for each in fields.get(key, [])]
    for key in _SINGLE:
        # A list of items was the way to describe each one of a tuple.
        value = fields.get(key, True)
        inner += value if isinstance(value, list) else [value]
    return next(filter(None, map(_find_fault, inner)), "")


def _show(value: Any) -> str:
    return json.dumps(value)[:_NAME_CHARACTERS]
