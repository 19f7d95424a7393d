"""Reading of calls whose arguments are written between tags without quotes.

An end tag inside such an argument looks like its end, so a block is read whole or not at all: text
outside the arguments makes it malformed, because a call with half an argument is a different call.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_rollout.dialects.argument_kinds import Kinds, find_argument_kinds, kind_of
from flotilla_rollout.dialects.call_values import (
    Required,
    check_call_keys,
    error_reason,
    is_tool_name,
    make_call,
    required_arguments,
)
from flotilla_rollout.dialects.marked_text import mend_text
from flotilla_rollout.dialects.tagged_calls import DECODER
from flotilla_rollout.dialects.turns import ParseError, ToolCall
from flotilla_rollout.types import Tool

_MOST_QUOTED = 60
# In Python's spelling, from templates that do not render JSON.
_CONSTANTS = {"True": True, "False": False, "None": None}
_TEXT = frozenset({"string"})
_ANY = frozenset({"boolean", "integer", "number", "string", "array", "object", "null"})


@dataclass(frozen=True)
class WrittenForm:
    """Form of calls in a block: `call` has the groups name and body, `argument` key and value, and
    `text` if it says by "true" or "false" whether the value is a text.

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
_DSML = "\uff5cDSML\uff5c"


def _make_dsml(block: str) -> WrittenForm:
    """Build DeepSeek's form, of whose tags only the mark within is a token."""
    return _make_form(
        (f"<{_DSML}{block}>", f"</{_DSML}{block}>"),
        rf'<{_DSML}invoke name="(?P<name>[^"\n]+)">(?P<body>.*?)</{_DSML}invoke>',
        rf'\s*<{_DSML}parameter name="(?P<key>[^"\n]+)" string="(?P<text>true|false)">'
        rf"(?P<value>VALUE)</{_DSML}parameter>",
        _DSML,
    )


DSML = _make_dsml("tool_calls")
DSML_FUNCTIONS = _make_dsml("function_calls")
KEYED = _make_keyed()
KEYED_OPENSOURCE = _make_keyed(":opensource", "<tool_sep:opensource>")


def read_block(text: str, form: WrittenForm, tools: Sequence[Tool]) -> list[ToolCall | ParseError]:
    """Read the calls of a block without its own tags; `text` is marked."""
    matches = list(form.call.finditer(text))
    if not matches:
        return [ParseError("tool call is not in the form of this model's calls")]
    if stray := _text_between(text, matches):
        return [_refuse_stray(stray)]
    required = required_arguments(tools)
    return [_read_call(match, form, tools, required) for match in matches]


def _read_call(
    call: re.Match[str], form: WrittenForm, tools: Sequence[Tool], required: Required
) -> ToolCall | ParseError:
    name, body = call["name"].strip(), call["body"]
    if not is_tool_name(name, required):
        return ParseError("tool call needs the name of a tool")
    matches = list(form.argument.finditer(body))
    if stray := _text_between(body, matches):
        return _refuse_stray(stray)
    tool = next((tool for tool in tools if tool.name == name), None)
    kinds = {} if tool is None else find_argument_kinds(tool)
    arguments: dict[str, Any] = {}
    for match in matches:
        key = mend_text(match["key"]).strip()
        if key in arguments:
            return ParseError(f"tool call has the argument {_quote(key)} twice")
        try:
            arguments[key] = read_value(mend_text(match["value"]), _allow(match, kinds.get(key)))
        except ValueError as error:
            return ParseError(f"argument {_quote(key)} of a tool call {error}")
    if not arguments and (wrong := check_call_keys("", name, required)):
        return wrong
    return make_call({"name": name, "arguments": arguments}, required)


def _allow(match: re.Match[str], kinds: Kinds) -> Kinds:
    """Return the kinds of an argument, of which the form itself may tell a text."""
    text = match.groupdict().get("text")
    if text is None:
        return kinds
    return _TEXT if text == "true" else (kinds or _ANY) - _TEXT or _ANY - _TEXT


def read_value(text: str, allowed: Kinds) -> Any:
    """Return what the text is as JSON; the text itself, where a text is allowed and no other kind
    that it could be.

    Raises ValueError, with the fault, if it may not be a text and is not JSON."""
    kinds = allowed or frozenset()
    if kinds == _TEXT:
        return text
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if text in _CONSTANTS and kind_of(_CONSTANTS[text]) in kinds:
            return _CONSTANTS[text]
        if "string" in kinds or not kinds:
            return text
        reason = error_reason(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise ValueError(f"is not valid JSON: {reason}") from None
    if kinds and kind_of(value) not in kinds and "string" in kinds:
        return text
    return value


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
