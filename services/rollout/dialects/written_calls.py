"""Reading of calls whose arguments are written between tags without quotes.

An end tag inside such an argument looks like its end, so a block is read whole or not at all: text
outside the arguments makes it malformed, because a call with half an argument is a different call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.dialects.call_values import (
    check_call_keys,
    error_reason,
    required_arguments,
)
from services.rollout.dialects.marked_text import mend_text
from services.rollout.dialects.tagged_calls import DECODER
from services.rollout.dialects.turns import ParseError, ToolCall
from services.rollout.types import Tool

_MOST_QUOTED = 60
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
# In Python's spelling, from templates that do not render JSON.
_CONSTANTS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class WrittenForm:
    """Form of calls in a block: `call` has the groups name and body, `argument` key and value.

    Neither a key nor a value contains one of the tags."""

    block: tuple[str, str]
    call: re.Pattern[str]
    argument: re.Pattern[str]
    tags: tuple[str, ...]


def _make_form(block: tuple[str, str], call: str, argument: str, *tags: str) -> WrittenForm:
    """Build a form from patterns in which VALUE stands for a text without tags."""
    every = (*block, *tags)
    value = rf"(?:(?!{'|'.join(map(re.escape, every))}).)*?"
    patterns = [re.compile(each.replace("VALUE", value), re.DOTALL) for each in (call, argument)]
    return WrittenForm(block, patterns[0], patterns[1], every)


def _make_keyed(suffix: str = "", separator: str = "") -> WrittenForm:
    key, value = f"arg_key{suffix}", f"arg_value{suffix}"
    return _make_form(
        (f"<tool_call{suffix}>", f"</tool_call{suffix}>"),
        rf"\A\s*(?P<name>[^<\n]+?)\s*(?:{separator}\s*)?(?P<body>(?:<{key}>.*)?)\Z",
        rf"\s*<{key}>(?P<key>VALUE)</{key}>\s*<{value}>(?P<value>VALUE)</{value}>",
        f"<{key}>",
        f"</{key}>",
        f"<{value}>",
        f"</{value}>",
    )


def _make_parameters(block: tuple[str, str]) -> WrittenForm:
    return _make_form(
        block,
        r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>",
        r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>VALUE)\n?</parameter>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
    )


_TOOL_CALL = ("<tool_call>", "</tool_call>")
PARAMETERS = _make_parameters(_TOOL_CALL)
SEED_PARAMETERS = _make_parameters(("<seed:tool_call>", "</seed:tool_call>"))
INVOKES = _make_form(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    r'<invoke name="(?P<name>[^"\n]+)">(?P<body>.*?)</invoke>',
    r'\s*<parameter name="(?P<key>[^"\n]+)">(?P<value>VALUE)</parameter>',
    '<invoke name="',
    "</invoke>",
    '<parameter name="',
    "</parameter>",
)
KEYED = _make_keyed()
KEYED_OPENSOURCE = _make_keyed(":opensource", "<tool_sep:opensource>")


def read_block(text: str, form: WrittenForm, tools: Sequence[Tool]) -> list[ToolCall | ParseError]:
    """Read the calls of a block without its own tags; `text` is marked."""
    matches = list(form.call.finditer(text))
    if not matches:
        return [ParseError("tool call is not in the form of this model's calls")]
    if stray := _text_between(text, matches):
        return [_refuse_stray(stray)]
    return [_read_call(match["name"].strip(), match["body"], form, tools) for match in matches]


def _read_call(
    name: str, body: str, form: WrittenForm, tools: Sequence[Tool]
) -> ToolCall | ParseError:
    if not name or not name.isprintable():
        return ParseError("tool call needs the name of a tool")
    matches = list(form.argument.finditer(body))
    if stray := _text_between(body, matches):
        return _refuse_stray(stray)
    schemas = _find_schemas(name, tools)
    arguments: dict[str, Any] = {}
    for match in matches:
        key = mend_text(match["key"]).strip()
        if key in arguments:
            return ParseError(f"tool call has the argument {_quote(key)} twice")
        try:
            arguments[key] = read_value(mend_text(match["value"]), schemas.get(key))
        except ValueError as error:
            return ParseError(f"argument {_quote(key)} of a tool call {error}")
    if not arguments and (wrong := check_call_keys("", name, required_arguments(tools))):
        return wrong
    return ToolCall(name, json.dumps(arguments))


def read_value(text: str, schema: Any) -> Any:
    """Return the text itself if the schema allows a text, else its value as JSON.

    Raises ValueError, with the fault, if it may not be a text and is not JSON."""
    kinds = _find_kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if text in _CONSTANTS and _kind(_CONSTANTS[text]) in kinds:
            return _CONSTANTS[text]
        if "string" in kinds or not kinds:
            return text
        reason = error_reason(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise ValueError(f"is not valid JSON: {reason}") from None
    if kinds and _kind(value) not in kinds and "string" in kinds:
        return text
    return value


def _find_kinds(schema: Any) -> set[str]:
    """Return the kinds of values that a schema allows; none if it does not specify them."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    kinds = {declared} if isinstance(declared, str) else set(declared or ())
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= _find_kinds(branch)
    if not kinds:
        kinds = {_kind(value) for value in schema.get("enum") or ()}
    return kinds | ({"integer"} if "number" in kinds else set())


def _kind(value: Any) -> str:
    return next(kind for each, kind in _KINDS if isinstance(value, each))


def _find_schemas(name: str, tools: Sequence[Tool]) -> Mapping[str, Any]:
    found = next((tool.parameters.get("properties") for tool in tools if tool.name == name), None)
    return found if isinstance(found, Mapping) else {}


def _text_between(text: str, matches: Sequence[re.Match[str]]) -> str:
    """Return the text outside the matches, stripped."""
    ends = [0, *(match.end() for match in matches)]
    starts = [*(match.start() for match in matches), len(text)]
    return "".join(text[end:start] for end, start in zip(ends, starts, strict=True)).strip()


def _refuse_stray(text: str) -> ParseError:
    return ParseError(f"tool call has text that belongs to no argument: {_quote(mend_text(text))}")


def _quote(text: str) -> str:
    """Quote a text as a JSON string, so that it cannot break the message."""
    return json.dumps(text[:_MOST_QUOTED])
