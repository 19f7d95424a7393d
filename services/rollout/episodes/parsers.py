"""Reads what a policy turn asks for: tool calls in order, malformed ones, whether it is done.

The parser is total: any text gives a result. Calls are JSON objects between `<tool_call>` and
`</tool_call>`, the form of Qwen and Hermes models. Only what stands outside the thinking counts.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from services.rollout.types import Tool

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
DONE = "<done>"
THINK_START = "<think>"
THINK_END = "</think>"
SPACE = re.compile(r"\s*")
OPENINGS = re.compile("|".join(map(re.escape, (CALL_START, THINK_START))))
TAGS = re.compile(f"{OPENINGS.pattern}|{re.escape(THINK_END)}")
# Wherever a malformed call may end.
BOUNDARY = re.compile(f"{re.escape(CALL_END)}|{re.escape(CALL_START)}")
ARGUMENTS = ("arguments", "params")
# Keys that hold no arguments whatever stands under them.
OTHERS = ("name", "tool", "id", "type")
# Calls that are read of one turn.
MOST_CALLS = 1_000
# Characters of the policy's or an environment's names in one message.
MOST_QUOTED = 100


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call. `arguments_json` is a JSON object."""

    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ParseError:
    """A malformed call; the policy reads the message."""

    message: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What one policy turn says. `answer` is its text without thinking, calls and `<done>`."""

    items: tuple[ToolCall | ParseError, ...]
    done: bool
    answer: str

    @property
    def has_call(self) -> bool:
        return any(isinstance(item, ToolCall) for item in self.items)


def parse_turn(text: str, tools: Sequence[Tool] = (), *, thinking: bool = False) -> Turn:
    """Parse the text of one turn; `thinking` is True when it starts inside the thinking.

    `tools` are those of the environment. A call without arguments is one of a tool that requires
    none; of a tool that is not among them, the environment says so.
    """
    reader = _Reader(text, {tool.name: _required(tool) for tool in tools})
    reader.read(thinking=thinking)
    # Joined by a character that is in no tag: two ends never make up a `<done>`.
    said = "\n".join(reader.outside)
    return Turn(tuple(reader.items), DONE in said, said.replace(DONE, "").strip())


class _Text(str):
    """Text in which an error of JSON does not look for its line: it would count all lines before
    it, for each of the calls of a turn."""

    __slots__ = ()

    def count(self, *_: Any) -> int:
        return 0

    def rfind(self, *_: Any) -> int:
        return -1


class _Reader:
    """Goes through a text once. A tag inside a call's JSON, or inside the thinking, opens nothing.

    The thinking ends at the first `</think>`. One that closes no `<think>` ends a thinking whose
    start is not part of the text; once some thinking has ended, it is text like any other.
    """

    def __init__(self, text: str, required: Mapping[str, Collection[str]]) -> None:
        self.items: list[ToolCall | ParseError] = []
        # The pieces between calls and thinking.
        self.outside: list[str] = []
        self._text = _Text(text)
        self._required = required
        self._begin = 0
        self._thought = False

    def read(self, *, thinking: bool) -> None:
        if thinking:
            self._skip_thinking(0)
        position = self._begin
        while match := (OPENINGS if self._thought else TAGS).search(self._text, position):
            position = self._tag(match)
        self.outside.append(self._text[self._begin :])

    def _tag(self, match: re.Match[str]) -> int:
        """Returns where to look for the next tag."""
        tag, before = match.group(), self._text[self._begin : match.start()]
        if tag == CALL_START:
            self._begin = self._call(match.end())
            self.outside.append(before)
        elif tag == THINK_START:
            self._skip_thinking(match.end())
            self.outside.append(before)
        else:
            self._thought, self._begin = True, match.end()
            self.items.clear()
            self.outside.clear()
        return self._begin

    def _call(self, start: int) -> int:
        """Returns where the call ends. Those beyond the limit are one error and not looked at."""
        if len(self.items) > MOST_CALLS:
            return start
        if len(self.items) == MOST_CALLS:
            self.items.append(ParseError(f"a turn may hold {MOST_CALLS} tool calls, not more"))
            return start
        item, end = _scan_call(self._text, start, self._required)
        self.items.append(item)
        return end

    def _skip_thinking(self, position: int) -> None:
        """To behind its end; everything is thinking when it is never closed."""
        end = self._text.find(THINK_END, position)
        self._thought = True
        self._begin = len(self._text) if end < 0 else end + len(THINK_END)


def _required(tool: Tool) -> Collection[str]:
    """The arguments that a tool's schema demands."""
    names = tool.parameters.get("required")
    return [str(name) for name in names] if isinstance(names, list) else []


def _scan_call(
    text: str, start: int, required: Mapping[str, Collection[str]]
) -> tuple[ToolCall | ParseError, int]:
    """The call whose start tag ends at `start`, and where to read on.

    The JSON is read first and the end tag looked for behind it: an end tag inside a string
    argument ends nothing."""
    begin = _skip_space(text, start)
    try:
        value, end = DECODER.raw_decode(text, begin)
    except RecursionError:
        return ParseError("tool call is nested too deeply"), _boundary(text, begin)
    except ValueError as error:
        return ParseError(f"tool call is not valid JSON: {_reason(error)}"), _boundary(text, begin)
    end = _skip_space(text, end)
    if text.startswith(CALL_END, end):
        return _as_call(value, required), end + len(CALL_END)
    if end == len(text):
        return _as_call(value, required), end
    problem = ParseError(f"expected {CALL_END} after the JSON object of a tool call")
    return problem, _boundary(text, end)


def _skip_space(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    return match.end() if match else position


def _boundary(text: str, position: int) -> int:
    """Behind the next end tag, or before the next start tag, or the end of the text."""
    match = BOUNDARY.search(text, position)
    if match is None:
        return len(text)
    return match.end() if match.group() == CALL_END else match.start()


def _as_call(value: Any, required: Mapping[str, Collection[str]]) -> ToolCall | ParseError:
    if not isinstance(value, dict):
        return ParseError('tool call must be a JSON object with "name" and "arguments"')
    name = value.get("name", value.get("tool"))
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        return ParseError('tool call needs "name", the name of a tool')
    arguments = _arguments(value, name, required.get(name, ()))
    if isinstance(arguments, ParseError):
        return arguments
    try:
        return ToolCall(name, json.dumps(arguments, allow_nan=False))
    except RecursionError:
        return ParseError("tool call is nested too deeply")
    except ValueError as error:
        return ParseError(f"tool call has arguments that JSON cannot express: {_reason(error)}")


def _arguments(
    call: dict[str, Any], name: str, required: Collection[str]
) -> dict[str, Any] | ParseError:
    """Nothing that the policy wrote as arguments is left out in silence: a call that is executed
    without them teaches it something wrong."""
    places = [key for key in ARGUMENTS if key in call]
    if len(places) > 1:
        return ParseError(f"tool call has its arguments twice, under {_quoted(places)}")
    arguments = call[places[0]] if places else {}
    if not isinstance(arguments, dict):
        return ParseError('"arguments" of a tool call must be a JSON object')
    others = [key for key in call if key not in (*ARGUMENTS, *OTHERS)]
    if places:
        others = [key for key in others if isinstance(call[key], dict) and not arguments]
    if others:
        return ParseError(
            f'tool call needs its arguments under "arguments", found {_quoted(others)}'
        )
    if required and not places:
        return ParseError(
            f'tool call of {_quoted([name])} needs "arguments" with {_quoted(required)}'
        )
    return arguments


def _quoted(names: Collection[str]) -> str:
    """Names as JSON strings: what they hold cannot break the message."""
    return ", ".join(json.dumps(name) for name in names)[:MOST_QUOTED]


def _reason(error: ValueError) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _integer(digits: str) -> int:
    """An int of any length that Python converts; beyond, a ValueError with our own words."""
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"an integer of {len(digits)} digits is too long") from None


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_int=_integer, parse_constant=_constant)
