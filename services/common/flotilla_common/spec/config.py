"""Frozen configuration from the tables of a run spec; errors list every mistake."""

import difflib
import json
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic_core import ErrorDetails

from flotilla_common.rpc.errors import ConfigError

SECRET_KEY = re.compile(r"token|secret|password|api_?key|webhook", re.IGNORECASE)
_SHOWN_CHARACTERS = 80


class ConfigModel(pydantic.BaseModel):
    """Base of every configuration table: frozen, and unknown keys are errors."""

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        # A key `model_max_len` is a plain key, not a clash with pydantic's own attributes.
        protected_namespaces=(),
    )

    @classmethod
    def explain_former(cls, key: str, value: Any) -> str:
        """Return what replaces a key that this table no longer has; "" if it never had it."""
        return ""


M = TypeVar("M", bound=ConfigModel)


def parse_config(cls: type[M], data: Mapping[str, Any], *, where: str, section: str = "") -> M:
    """Parse `data` as a `cls`. Types are strict: `"8"` is not a number.

    Raises ConfigError, which lists every problem with the dotted name of its key: `section` is the
    name of the table that `data` holds, and `where` names the file."""
    prefix = tuple(section.split(".")) if section else ()
    try:
        text = _dump_json(_table_of(data, prefix, where), where, prefix)
        return cls.model_validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
    raise _refusal(where, [_describe_problem(cls, problem, prefix) for problem in problems])


def canonical_json(spec: Mapping[str, Any], *, where: str = "spec") -> str:
    """Return the one JSON text of a spec: sorted keys, no spaces, finite numbers only."""
    return _dump_json(spec, where, ())


def _dump_json(spec: Mapping[str, Any], where: str, prefix: Sequence[str]) -> str:
    try:
        return json.dumps(
            spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        unfit = [f"{'.'.join((*prefix, *key))}: {why}" for key, why in _find_unfit(spec)]
        raise _refusal(where, unfit or [f"not expressible as JSON: {error}"]) from error


def _table_of(data: Any, prefix: Sequence[str], where: str) -> Mapping[str, Any]:
    if isinstance(data, Mapping):
        return data
    name = ".".join(prefix) or "(top level)"
    raise _refusal(where, [f"{name}: expected a table; got {_shown(data)}"])


def _find_unfit(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the key of each value that JSON cannot express, and the fix."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _find_unfit(item, (*key, str(name)))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _find_unfit(item, (*key, str(number)))
    elif isinstance(value, float) and not math.isfinite(value):
        yield key, f"must be a finite number; got {value} (leave the key out for its default)"
    elif isinstance(value, date | time):
        yield key, f"write dates and times as quoted strings; got {value}"


def given_keys(table: ConfigModel) -> list[str]:
    """Return the keys that a spec sets to something else than their defaults, sorted."""
    fields: Mapping[str, Any] = type(table).model_fields
    given = sorted(table.model_fields_set)
    return [key for key in given if getattr(table, key) != fields[key].get_default()]


def refuse_problems(head: str, problems: Iterable[str]) -> None:
    """Raise ConfigError with a line for each problem below `head`, if there are any."""
    if found := list(problems):
        raise ConfigError("\n  ".join([head, *found]))


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return the end of an error message about an unknown name."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def _refusal(where: str, problems: Sequence[str]) -> ConfigError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n".join([f"{where}: {count}", *(f"  {each}" for each in problems)]))


def _describe_problem(cls: type[ConfigModel], error: ErrorDetails, prefix: Sequence[str]) -> str:
    location = error["loc"]
    name = ".".join(str(part) for part in (*prefix, *location)) or "(top level)"
    if error["type"] == "extra_forbidden":
        key, tables = str(location[-1]), _tables_at(cls, location[:-1])
        former = next(
            filter(None, (each.explain_former(key, error["input"]) for each in tables)), ""
        )
        return f"{name}: {former or 'unknown key' + did_you_mean(key, _known_keys(tables))}"
    if error["type"] == "missing":
        return f"{name}: missing; it has no default"
    message = error["msg"].removeprefix("Value error, ")
    key, colon, rest = message.partition(": ")
    if colon and key.partition(".")[0] in _known_keys(_tables_at(cls, location)):
        # The error is from a validator of a whole table, and names one of its keys.
        name, message = f"{name}.{key}" if location or prefix else key, rest
    if SECRET_KEY.search(name) or isinstance(error["input"], dict | list):
        return f"{name}: {message}"
    return f"{name}: {message}; got {_shown(error['input'])}"


def _shown(value: Any) -> str:
    shown = repr(value)
    return f"{shown[:_SHOWN_CHARACTERS]}..." if len(shown) > _SHOWN_CHARACTERS else shown


def _tables_at(cls: type[ConfigModel], location: Sequence[int | str]) -> list[type[ConfigModel]]:
    """Return the table at `location`; for a union of several tables, all of them."""
    tables = [cls]
    for part in location:
        fields = [table.model_fields.get(str(part)) for table in tables]
        below = [table for field in fields if field for _, table in find_tables(field.annotation)]
        # List indices, dict keys and the names of union branches do not lead to another table.
        tables = below or tables
    return tables


def _known_keys(tables: Sequence[type[ConfigModel]]) -> list[str]:
    return sorted({_key(table, name) for table in tables for name in table.model_fields})


def _key(table: type[ConfigModel], name: str) -> str:
    return table.model_fields[name].alias or name


def find_tables(annotation: Any) -> Iterator[tuple[str, type[ConfigModel]]]:
    """Yield the tables that a key of this type holds, each with the rest of the path to it: `.0` in
    a list, `.NAME` in a table of tables, and "" for the key's own."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield "", annotation
        return
    origin = get_origin(annotation)
    if origin in (Annotated, Union, types.UnionType):
        step = ""
    elif isinstance(origin, type) and issubclass(origin, Mapping | list | tuple):
        step = ".NAME" if issubclass(origin, Mapping) else ".0"
    else:
        return
    for argument in get_args(annotation):
        for rest, table in find_tables(argument):
            yield f"{step}{rest}", table
