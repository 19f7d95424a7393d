"""Arguments drawn from the JSON schema of a tool. Pure, given the random numbers."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, cast

from flotilla_reading.own_tools.sql_statements import SqlTable, draw_statement, takes_sql
from flotilla_reading.own_tools.values import (
    ID,
    NAME,
    PATH,
    TEXT,
    ValuePool,
    is_harmless,
    kind_of,
    make_name,
    make_path,
    make_sentence,
    split_name,
)

_DEEPEST = 8
# A schema is somebody else's: a part of it that needs more values than this is not drawn.
_MOST_VALUES = 40
_EXAMPLES = re.compile(
    r"(?:e\.g\.|such as|for example|examples?:?|like)[^.;]{0,20}?([\"'`].{1,200})", re.I | re.S
)
_QUOTED = re.compile(r"([\"'`])([^\"'`\n]{1,60})\1")
_TOP = re.compile(r"repo|root|base|work|project", re.IGNORECASE)
_GIVEN, _MADE = {"source", "src", "from", "old"}, {"destination", "dst", "to", "new", "target"}
_FOLDER = {"folder", "folders", "dir", "directory", "directories"}
_MAKING = {"create", "add", "make", "new", "insert", "register"}
# Words of parameters for things that have a name.
_OTHERS = {"from", "to", "source", "target", "parent", "owner", "node", "entity"}
# Words of parameters for what stands in a file already.
_REPLACED = {"old", "search", "find", "before", "original"}
_EXPRESSION = {"expression", "formula", "equation"}


class UndrawableError(Exception):
    """A schema from which no arguments can be drawn; the message gives the reason."""


@dataclass(slots=True)
class Draw:
    """One drawing of arguments. `made` are the new values of the calls before, by the kind of their
    parameter: later calls are likely to use them. `reuse` is the share of values that exist;
    `invented` is set once a value was made up."""

    rng: random.Random
    pool: ValuePool
    tables: Sequence[SqlTable] = ()
    reuse: float = 0.5
    made: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    left: int = _MOST_VALUES
    makes_folders: bool = False
    makes_things: bool = False
    path: str = ""
    invented: bool = False

    def arguments(self, tool: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Draw an object of a tool's input schema. Raises UndrawableError."""
        self.left, self.path = _MOST_VALUES, ""
        self.makes_folders = bool(set(split_name(tool)) & _FOLDER)
        self.makes_things = bool(set(split_name(tool)) & _MAKING)
        return self._object(schema, schema, 0)

    def _object(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> dict[str, Any]:
        given = schema.get("properties")
        properties = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        listed = schema.get("required")
        required = (
            [n for n in cast("list[Any]", listed) if isinstance(n, str)]
            if isinstance(listed, list)
            else []
        )
        names = required or [name for name in properties if self.rng.random() < 0.5]
        drawn: dict[str, Any] = {}
        for name in names:
            if not is_harmless(name):
                raise UndrawableError("a parameter has a name that is no identifier")
            drawn[name] = self._value(name, properties.get(name, {}), root, depth + 1)
        return drawn

    def _value(self, name: str, schema: Any, root: Mapping[str, Any], depth: int) -> Any:
        self.left -= 1
        if depth > _DEEPEST or self.left < 0:
            raise UndrawableError("the schema is too deep, or demands too many values")
        shape = _resolve(schema, root)
        if (listed := _choices(shape)) is not None:
            harmless = [each for each in listed if not isinstance(each, str) or is_harmless(each)]
            if not harmless:
                raise UndrawableError(f"no value that {name} may have can stand in a prompt")
            return self.rng.choice(harmless)
        for key in ("anyOf", "oneOf", "allOf"):
            options = shape.get(key)
            if isinstance(options, list) and options:
                some = [
                    o for o in cast("list[Any]", options) if _resolve(o, root).get("type") != "null"
                ]
                base = {k: v for k, v in shape.items() if k in ("description", "title", "examples")}
                return self._value(
                    name, base | _resolve((some or options)[0], root), root, depth + 1
                )
        return self._plain(name, shape, root, depth)

    def _plain(
        self, name: str, shape: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> Any:
        match _type_of(shape):
            case "boolean":
                return self.rng.random() < 0.5
            case "integer":
                return int(self._number(name, shape))
            case "number":
                return self._number(name, shape)
            case "array":
                return self._array(name, shape, root, depth)
            case "object":
                return self._object(shape, root, depth)
            case "string":
                return self._text(name, shape)
            case other:
                raise UndrawableError(f"{name} has the type {other!r:.40}")

    def _array(
        self, name: str, shape: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> list[Any]:
        least, most = _bound(shape, "minItems", 1), _bound(shape, "maxItems", 2)
        count = max(least, min(most, 1 if self.rng.random() < 0.7 else 2))
        if count > _MOST_VALUES:
            raise UndrawableError(f"{name} needs {count} items")
        drawn: list[Any] = []
        for _ in range(count):
            each = self._value(name, shape.get("items", {}), root, depth + 1)
            if each not in drawn:
                drawn.append(each)
        return drawn

    def _number(self, name: str, shape: Mapping[str, Any]) -> float:
        known = [v for v in self.pool.known(name) if isinstance(v, int)]
        if known and kind_of(name) == ID:
            return self.rng.choice(known)
        least = _bound(shape, "minimum", _bound(shape, "exclusiveMinimum", 0) + 1)
        most = _bound(shape, "maximum", max(least, 0) + 40)
        return self.rng.randint(least, max(least, most))

    def _text(self, name: str, shape: Mapping[str, Any]) -> str:
        words, description = set(split_name(name)), str(shape.get("description") or "")[:2000]
        if takes_sql(name, description):
            statement, table = draw_statement(self.rng, self.tables, description)
            if table is not None:
                self._note(NAME, table)
            return statement
        if (made := self._by_format(words, shape, description)) is not None:
            return made
        examples = [
            e
            for _, e in _QUOTED.findall(" ".join(_EXAMPLES.findall(description)))
            if is_harmless(e)
        ]
        if examples:
            return self.rng.choice(examples)
        kind = kind_of(name)
        if kind == PATH:
            self.path = self._path(name, words)
            return self.path
        if words & _REPLACED and (lines := self.pool.lines.get(self.path)):
            return self.rng.choice(lines)
        recent = [v for v in self.made.get(kind, []) if isinstance(v, str)]
        known = [v for v in self.pool.known(name) if isinstance(v, str)]
        if words & _OTHERS:
            known = known or [v for v in self.pool.known(NAME) if isinstance(v, str)]
        elif self.makes_things and words == {NAME}:
            # What is made has a name that nothing has yet.
            known = recent = []
        if kind != TEXT and recent and self.rng.random() < self.reuse:
            return self.rng.choice(recent)
        if kind != TEXT and known and (kind == ID or self.rng.random() < self.reuse):
            return self.rng.choice(known)
        return self._note(kind, make_sentence(self.rng) if kind == TEXT else make_name(self.rng))

    def _path(self, name: str, words: set[str]) -> str:
        if _TOP.search(name):
            return "."
        folders = [*self.pool.folders, *self.made.get("folder", [])]
        existing = [*self.pool.paths, *self.made.get(PATH, [])]
        takes_folder = self.makes_folders or bool(words & _FOLDER)
        is_given, is_new = bool(words & _GIVEN), bool(words & _MADE)
        if not is_new and (is_given or self.rng.random() < self.reuse):
            recent = self.made.get(PATH, [])
            if recent and self.rng.random() < self.reuse:
                return self.rng.choice(recent)
            return self.rng.choice(folders if takes_folder or not existing else existing)
        return self._note(PATH, make_path(self.rng, folders, is_folder=takes_folder))

    def _by_format(self, words: set[str], shape: Mapping[str, Any], description: str) -> str | None:
        form = str(shape.get("format") or "")
        day = date(2027, 1, 1) + timedelta(days=self.rng.randrange(365))
        if form == "date" or "YYYY-MM-DD" in description:
            return day.isoformat()
        if form == "date-time":
            return f"{day.isoformat()}T{self.rng.randrange(8, 18):02}:00:00Z"
        if form == "time" or "HH:MM" in description:
            return f"{self.rng.randrange(24):02}:{self.rng.choice((0, 15, 30, 45)):02}"
        if form == "email" or "email" in words:
            return f"{make_name(self.rng)}@example.com"
        if form == "uri" or words & {"url", "uri", "link"}:
            return f"https://example.com/{make_name(self.rng)}"
        if words & _EXPRESSION:
            one, other = self.rng.randrange(2, 100), self.rng.randrange(2, 100)
            return f"{one} {self.rng.choice('+-*')} {other}"
        return None

    def _note(self, kind: str, value: str) -> str:
        self.invented = True
        self.made.setdefault(kind, []).append(value)
        return value


def _resolve(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema, or what its `$ref` within the same document names."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, dict):
            return {}
        reference = cast("dict[str, Any]", schema).get("$ref")
        if not isinstance(reference, str):
            return cast("dict[str, Any]", schema)
        found: Any = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = cast("dict[str, Any]", found).get(part) if isinstance(found, dict) else None
        schema = found
    raise UndrawableError("the schema refers to itself")


def _choices(shape: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, if it does."""
    if "const" in shape:
        return [shape["const"]]
    for key in ("enum", "examples"):
        listed = shape.get(key)
        if isinstance(listed, list) and listed:
            return [each for each in cast("list[Any]", listed) if each is not None]
    return None


def _type_of(shape: Mapping[str, Any]) -> str:
    kind = shape.get("type")
    if isinstance(kind, list):
        kind = next((each for each in cast("list[Any]", kind) if each != "null"), "string")
    if isinstance(kind, str):
        return kind
    return "object" if "properties" in shape else "array" if "items" in shape else "string"


def _bound(shape: Mapping[str, Any], key: str, default: int) -> int:
    value = shape.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(cast("float", value)) if is_number and abs(cast("float", value)) < 2**53 else default
