"""Kinds of values that a tool's schema allows for each of its arguments.

Schemas come from environments: what is not understood allows any kind.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flotilla_rollout.types import Tool

# A set of JSON Schema's types; None if any is allowed.
Kinds = frozenset[str] | None

_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
# References followed from one schema to another: some environments' refer to each other.
_MOST_REFERENCES = 8
# Spellings of types by environments that write no JSON Schema, in lower case.
_NAMES = {
    **{kind: kind for _, kind in _KINDS},
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("list", "tuple"), "array"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("none", "nil"), "null"),
}


def find_argument_names(tool: Tool) -> list[str]:
    """Return the names of the arguments that a tool declares."""
    return [str(name) for name, _ in _find_properties(tool)]


def find_argument_kinds(tool: Tool) -> Mapping[str, Kinds]:
    """Return the kinds of a tool's arguments by name, with references resolved."""
    return {
        str(name): find_kinds(schema, tool.parameters) for name, schema in _find_properties(tool)
    }


def find_kinds(schema: Any, root: Any = None, seen: tuple[str, ...] = ()) -> Kinds:
    """Return the kinds that a schema allows; references are looked up in `root`."""
    allowed: Kinds = None
    for part, followed in _find_parts(schema, root, seen):
        for kinds in _find_own_kinds(part, root, followed):
            # Parts that contradict each other say nothing.
            allowed = kinds if allowed is None else (allowed & kinds or None)
    return allowed


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value."""
    return next(kind for each, kind in _KINDS if isinstance(value, each))


def _find_properties(tool: Tool) -> Iterator[tuple[Any, Any]]:
    for part, _ in _find_parts(tool.parameters, tool.parameters, ()):
        yield from _mapping(part.get("properties")).items()


def _find_parts(
    schema: Any, root: Any, seen: tuple[str, ...]
) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...]]]:
    """Yield a schema and all that hold beside it, those it refers to and `allOf`, each with the
    references followed to it."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen and len(seen) < _MOST_REFERENCES:
        seen = (*seen, reference)
        yield from _find_parts(_look_up(reference, root), root, seen)
    yield schema, seen
    for each in _sequence(schema.get("allOf")):
        yield from _find_parts(each, root, seen)


def _find_own_kinds(
    schema: Mapping[str, Any], root: Any, seen: tuple[str, ...]
) -> Iterator[frozenset[str]]:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else _sequence(declared)
    kinds = [_NAMES.get(name.lower()) if isinstance(name, str) else None for name in names]
    known = frozenset(kind for kind in kinds if kind)
    if known and all(kinds):
        yield known | ({"integer"} if "number" in known else frozenset())
    if "const" in schema:
        yield frozenset([kind_of(schema["const"])])
    if values := _sequence(schema.get("enum")):
        yield frozenset(map(kind_of, values))
    for key in ("anyOf", "oneOf"):
        branches = [find_kinds(each, root, seen) for each in _sequence(schema.get(key))]
        if branches and all(branches):
            yield frozenset().union(*(each for each in branches if each))


def _look_up(reference: str, root: Any) -> Any:
    """Return what a reference within the schema names; None if there is nothing."""
    start, *steps = reference.split("/")
    if start != "#":
        return None
    found = root
    for step in steps:
        found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
