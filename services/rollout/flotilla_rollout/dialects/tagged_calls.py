"""Reading of calls written as JSON between tags, the form of Qwen and Hermes models.

The reader is total: any text gives a result, with calls in order, malformed ones, and the answer.
Only text outside the thinking counts.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flotilla_rollout.dialects.call_values import (
    MOST_QUOTED,
    Required,
    error_reason,
    make_call,
    required_arguments,
)
from flotilla_rollout.dialects.turns import DONE, ParseError, ToolCall, Turn
from flotilla_rollout.types import Tool

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
THINK_START = "<think>"
THINK_END = "</think>"
SPACE = re.compile(r"\s*")
# Calls read from one turn.
MOST_CALLS = 1_000
# Braces added to the end of a call that lacks them.
MOST_BRACES = 3


@dataclass(frozen=True)
class CallGrammar:
    """Form of calls: start tags with their end tags, and the mark of a finished task.

    With `repair` a call that lacks braces at its end is read as if it had them."""

    ends: Mapping[str, str] = field(default_factory=lambda: {CALL_START: CALL_END})
    done: tuple[str, ...] = (DONE,)
    repair: bool = False

    def __post_init__(self) -> None:
        openings = [*self.ends, THINK_START]
        patterns = {
            "openings": openings,
            "tags": [*openings, THINK_END],
            # All possible ends of a malformed call.
            "boundary": [*self.ends.values(), *self.ends],
            "done_marks": self.done,
        }
        for name, texts in patterns.items():
            object.__setattr__(self, name, re.compile("|".join(map(re.escape, texts))))

    openings: re.Pattern[str] = field(init=False)
    tags: re.Pattern[str] = field(init=False)
    boundary: re.Pattern[str] = field(init=False)
    done_marks: re.Pattern[str] = field(init=False)


STRICT = CallGrammar()
# The form of models that only know it from a description.
LENIENT = CallGrammar(
    ends={CALL_START: CALL_END, "<function_call>": "</function_call>"},
    done=(DONE, "[done]"),
    repair=True,
)


def parse_turn(
    text: str,
    tools: Sequence[Tool] = (),
    *,
    thinking: bool = False,
    grammar: CallGrammar = STRICT,
) -> Turn:
    """Parse the text of one turn; `thinking` is True if it starts inside the thinking.

    `tools` are the environment's. A call without arguments is valid for a tool that requires none;
    the environment reports an unknown tool.
    """
    reader = _Reader(text, required_arguments(tools), grammar)
    reader.read(thinking=thinking)
    # Joined by a character that is in no tag: two ends never form a `<done>`.
    outside = "\n".join(reader.outside)
    answer, marks = grammar.done_marks.subn("", outside)
    return Turn(tuple(reader.items), marks > 0, answer.strip())


class _Text(str):
    """Text in which a JSON error does not compute its line: that would count all lines before it,
    for each call of a turn."""

    __slots__ = ()

    def count(self, *_: Any) -> int:
        return 0

    def rfind(self, *_: Any) -> int:
        return -1


class _Reader:
    """One pass through a text. A tag inside a call's JSON, or inside the thinking, opens nothing.

    The thinking ends at the first `</think>`. If no `<think>` precedes it, the thinking started
    before the text; after a thinking has ended, further tags are ordinary text.
    """

    def __init__(self, text: str, required: Required, grammar: CallGrammar) -> None:
        self.items: list[ToolCall | ParseError] = []
        # The pieces between calls and thinking.
        self.outside: list[str] = []
        self._text = _Text(text)
        self._required = required
        self._grammar = grammar
        self._begin = 0
        self._thought = False

    def read(self, *, thinking: bool) -> None:
        if thinking:
            self._skip_thinking(0)
        position, grammar = self._begin, self._grammar
        while match := self._next_tags(grammar).search(self._text, position):
            position = self._read_tag(match)
        self.outside.append(self._text[self._begin :])

    def _next_tags(self, grammar: CallGrammar) -> re.Pattern[str]:
        return grammar.openings if self._thought else grammar.tags

    def _read_tag(self, match: re.Match[str]) -> int:
        """Return where to search for the next tag."""
        tag, before = match.group(), self._text[self._begin : match.start()]
        if tag in self._grammar.ends:
            self._begin = self._read_call(match.end(), self._grammar.ends[tag])
            self.outside.append(before)
        elif tag == THINK_START:
            self._skip_thinking(match.end())
            self.outside.append(before)
        else:
            self._thought, self._begin = True, match.end()
            self.items.clear()
            self.outside.clear()
        return self._begin

    def _read_call(self, start: int, end_tag: str) -> int:
        """Return where the call ends. Calls beyond the limit are one error and are not read."""
        if len(self.items) > MOST_CALLS:
            return start
        if len(self.items) == MOST_CALLS:
            self.items.append(ParseError(f"a turn may hold {MOST_CALLS} tool calls, not more"))
            return start
        item, end = self._scan_call(start, end_tag)
        self.items.append(item)
        return end

    def _scan_call(self, start: int, end_tag: str) -> tuple[ToolCall | ParseError, int]:
        """Return the call whose start tag ends at `start`, and where to continue.

        The JSON is read first and the end tag searched for after it: an end tag inside a string
        argument does not count."""
        text = self._text
        begin = _skip_space(text, start)
        try:
            value, end = DECODER.raw_decode(text, begin)
        except RecursionError:
            return ParseError("tool call is nested too deeply"), self._boundary(begin)
        except ValueError as error:
            return self._repair_call(begin, error), self._boundary(begin)
        end = _skip_space(text, end)
        if text.startswith(end_tag, end):
            return make_call(value, self._required), end + len(end_tag)
        if end == len(text):
            return make_call(value, self._required), end
        problem = ParseError(f"expected {end_tag} after the JSON object of a tool call")
        return problem, self._boundary(end)

    def _repair_call(self, begin: int, error: ValueError) -> ToolCall | ParseError:
        """Read a call that only lacks braces at its end, if the grammar allows it."""
        problem = ParseError(f"tool call is not valid JSON: {error_reason(error)}")
        if not self._grammar.repair:
            return problem
        match = self._grammar.boundary.search(self._text, begin)
        body = self._text[begin : match.start() if match else None].rstrip()
        for braces in range(1, MOST_BRACES + 1):
            try:
                value = json.loads(body + "}" * braces, cls=_CallDecoder)
            except (ValueError, RecursionError):
                continue
            return make_call(value, self._required)
        return problem

    def _boundary(self, position: int) -> int:
        """Return the position after the next end tag, before the next start tag, or at the end."""
        match = self._grammar.boundary.search(self._text, position)
        if match is None:
            return len(self._text)
        return match.start() if match.group() in self._grammar.ends else match.end()

    def _skip_thinking(self, position: int) -> None:
        """Advance past its end; an unclosed thinking extends to the end of the text."""
        end = self._text.find(THINK_END, position)
        self._thought = True
        self._begin = len(self._text) if end < 0 else end + len(THINK_END)


def _skip_space(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    return match.end() if match else position


def _integer(digits: str) -> int:
    """Parse an int of any length that Python converts. Raises ValueError with our own message."""
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"an integer of {len(digits)} digits is too long") from None


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class EqualKeysError(ValueError):
    """Two equal keys in one JSON object, of which a reader would drop one."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise EqualKeysError(f"{json.dumps(twice[:MOST_QUOTED])} occurs twice in one object")
    return made


class _CallDecoder(json.JSONDecoder):
    """Strict JSON decoder: no NaN, no equal keys, and no integer too long for Python."""

    def __init__(self, **_: Any) -> None:
        super().__init__(parse_int=_integer, parse_constant=_constant, object_pairs_hook=_object)


DECODER = _CallDecoder()
