"""What a policy turn asks for: tool calls in order, malformed ones, and whether it is done.

The parser is total: any text gives a result. Calls are JSON objects between `<tool_call>` and
`</tool_call>`, the form of Qwen and Hermes models. Only what follows the thinking counts.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
DONE = "<done>"
THINK_START = "<think>"
THINK_END = "</think>"
SPACE = re.compile(r"\s*")
# Wherever a malformed call may end.
BOUNDARY = re.compile(f"{re.escape(CALL_END)}|{re.escape(CALL_START)}")


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


def parse_turn(text: str, *, thinking: bool = False) -> Turn:
    """Parse the text of one turn; `thinking` is True when it starts inside the thinking."""
    visible = after_thinking(text, thinking=thinking)
    items: list[ToolCall | ParseError] = []
    outside: list[str] = []
    position = 0
    while (start := visible.find(CALL_START, position)) >= 0:
        outside.append(visible[position:start])
        item, position = _scan_call(visible, start + len(CALL_START))
        items.append(item)
    outside.append(visible[position:])
    # Joined by a character that is in no tag: two ends never make up a `<done>`.
    said = "\n".join(outside)
    return Turn(tuple(items), DONE in said, said.replace(DONE, "").strip())


def after_thinking(text: str, *, thinking: bool = False) -> str:
    """What follows the last `</think>`; nothing when the thinking was never closed."""
    _, closed, rest = text.rpartition(THINK_END)
    if THINK_START in rest or (thinking and not closed):
        return ""
    return rest


def _scan_call(text: str, start: int) -> tuple[ToolCall | ParseError, int]:
    """The call whose start tag ends at `start`, and where to read on.

    The JSON is read first and the end tag looked for behind it: an end tag inside a string
    argument ends nothing.
    """
    begin = _skip_space(text, start)
    try:
        value, end = DECODER.raw_decode(text, begin)
    except RecursionError:
        return ParseError("tool call is nested too deeply"), _boundary(text, begin)
    except ValueError as error:
        return ParseError(f"tool call is not valid JSON: {_reason(error)}"), _boundary(text, begin)
    end = _skip_space(text, end)
    if text.startswith(CALL_END, end):
        return _as_call(value), end + len(CALL_END)
    if end == len(text):
        return _as_call(value), end
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


def _as_call(value: Any) -> ToolCall | ParseError:
    if not isinstance(value, dict):
        return ParseError('tool call must be a JSON object with "name" and "arguments"')
    name = value.get("name", value.get("tool"))
    arguments = value.get("arguments", value.get("params", {}))
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        return ParseError('tool call needs "name", the name of a tool')
    if not isinstance(arguments, dict):
        return ParseError('"arguments" of a tool call must be a JSON object')
    try:
        return ToolCall(name, json.dumps(arguments, allow_nan=False))
    except RecursionError:
        return ParseError("tool call is nested too deeply")
    except ValueError as error:
        return ParseError(f"tool call has arguments that JSON cannot express: {_reason(error)}")


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
