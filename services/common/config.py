"""Frozen configuration from TOML or JSON with dotted overrides; every mistake is named at once."""

import difflib
import hashlib
import json
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic_core import ErrorDetails

from services.common.errors import ConfigError

_SECRET_KEY = re.compile(r"token|secret|password|api_?key|webhook", re.IGNORECASE)
_SHOWN_CHARACTERS = 80


class Model(pydantic.BaseModel):
    """Base of every configuration table: frozen, and nothing passes that it does not name."""

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        # A key `model_max_len` is a plain key, not a clash with pydantic's own attributes.
        protected_namespaces=(),
    )


M = TypeVar("M", bound=Model)


def load_spec(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The run spec in `path` (TOML, or JSON by its suffix) with `--a.b=value` overrides applied.

    `{seed}` inside any string becomes the value of the top-level key `seed`. Raises ConfigError.
    """
    spec = _read(path)
    for override in overrides:
        apply_override(spec, override)
    seed = spec.get("seed", 0)
    spec = {key: _with_seed(value, str(seed)) for key, value in spec.items()}
    canonical_json(spec, where=str(path))
    return spec


def parse(cls: type[M], data: Mapping[str, Any], *, where: str) -> M:
    """`data` as a `cls`. Types are strict (`"8"` is no number); raises ConfigError listing every
    problem with the dotted name of its key. `where` names the file or table in the message."""
    try:
        return cls.model_validate_json(canonical_json(data, where=where), strict=True)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        lines = [f"  {_problem(cls, problem)}" for problem in problems]
    raise ConfigError("\n".join([f"{where}: {_count(len(lines))}", *lines]))


def canonical_json(spec: Mapping[str, Any], *, where: str = "spec") -> str:
    """The one JSON text of a spec: sorted keys, no spaces, finite numbers only."""
    try:
        return json.dumps(
            spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: not expressible as JSON ({error}); write dates as quoted strings and"
            " leave out keys instead of using inf or nan"
        ) from error


def spec_sha256(spec: Mapping[str, Any]) -> bytes:
    """The identity of a spec: SHA-256 of its canonical JSON."""
    return hashlib.sha256(canonical_json(spec).encode()).digest()


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The end of an error message about an unknown name."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    try:
        spec: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path}: not {kind}: {error}") from error
    if not isinstance(spec, dict):
        raise ConfigError(f"{path}: the top level must be a table")
    return spec


def apply_override(spec: dict[str, Any], override: str) -> None:
    """Set one `--a.b=value` in `spec`, making the tables on the way. Raises ConfigError."""
    key, equals, text = override.removeprefix("--").partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r}: write --section.key=value")
    node: Any = spec
    for depth, part in enumerate(parts[:-1]):
        where = ".".join(parts[: depth + 1])
        if isinstance(node, list):
            node = node[_index(node, part, override)]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {where} is a value, not a table")
    if isinstance(node, list):
        node[_index(node, parts[-1], override)] = _value(text)
    else:
        node[parts[-1]] = _value(text)


def _index(items: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(
            f"override {override!r}: {part!r} is not one of the {len(items)} indices of the list"
        )
    return int(part)


def _value(text: str) -> Any:
    """A TOML value where `text` is one, else the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    is_json = isinstance(value, str | bool | int | float | list | dict)
    return value if len(parsed) == 1 and is_json else text


def _with_seed(value: Any, seed: str) -> Any:
    if isinstance(value, str):
        return value.replace("{seed}", seed)
    if isinstance(value, dict):
        return {key: _with_seed(item, seed) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_seed(item, seed) for item in value]
    return value


def _count(problems: int) -> str:
    return "1 problem" if problems == 1 else f"{problems} problems"


def _problem(cls: type[Model], error: ErrorDetails) -> str:
    location = error["loc"]
    name = ".".join(str(part) for part in location) or "(top level)"
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown key{did_you_mean(str(location[-1]), _fields(cls, location[:-1]))}"
    if error["type"] == "missing":
        return f"{name}: missing; it has no default"
    message = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    if _SECRET_KEY.search(name) or isinstance(value, dict | list):
        return f"{name}: {message}"
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}..."
    return f"{name}: {message}; got {shown}"


def _fields(cls: type[Model], location: Sequence[int | str]) -> list[str]:
    """The keys known at `location`; where a union leaves several tables, those of all of them."""
    tables: list[type[pydantic.BaseModel]] = [cls]
    for part in location:
        fields = [table.model_fields.get(str(part)) for table in tables]
        below = [model for field in fields if field for model in _models(field.annotation)]
        # List indices, dict keys and the names of union branches lead to no other table.
        tables = below or tables
    return sorted({_key(table, name) for table in tables for name in table.model_fields})


def _key(table: type[pydantic.BaseModel], name: str) -> str:
    return table.model_fields[name].alias or name


def _models(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, types.UnionType, list, dict, tuple):
        for argument in get_args(annotation):
            yield from _models(argument)
