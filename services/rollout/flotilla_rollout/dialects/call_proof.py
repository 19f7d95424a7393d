"""Proof that the calls that another's parser has read are those that the policy wrote.

Such parsers complete what was cut, take the last of two equal keys, skip a second section of calls
and convert texts to numbers. A call is executed only if it stands in the sampled text: as the same
JSON where the family writes arguments as JSON, else as the words and signs with which the family's
own template writes the call again.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flotilla_rollout.dialects.marked_text import mend_text
from flotilla_rollout.dialects.tagged_calls import DECODER, EqualKeysError
from flotilla_rollout.dialects.template_turns import SAMPLE_ARGUMENTS, SAMPLE_NAME, TURN
from flotilla_rollout.dialects.turns import ParseError, ToolCall

Item = ToolCall | ParseError
WriteCalls = Callable[[Sequence[ToolCall]], str]

_WORD = re.compile(r"\w+|[^\w\s]")
# Braces of a turn that may begin no JSON.
_MOST_FAILURES = 200
_UNREAD = "a tool call could not be read; one begins by {}"
_OTHER = ParseError("tool call is not valid: it was read as another one than the one written")


class CallProof:
    """Proof for one family, whose template writes calls by `write`.

    `marks` are its control tokens, and `plain` a turn without a call; `end` is the text after the
    arguments of a call."""

    def __init__(
        self, write: WriteCalls, marks: Sequence[str] = (), plain: str = "", end: str = ""
    ) -> None:
        self._write = write
        sample = write([ToolCall(SAMPLE_NAME, json.dumps(SAMPLE_ARGUMENTS))])
        self.begin, self.end = sample.partition(TURN)[0], end
        before = sample.partition(SAMPLE_NAME)[0]
        # What opens a call: its control tokens before the name, or its first word.
        found = [mark for mark in marks if mark in before and mark not in plain]
        self.openings = found or ([] if plain else before.split()[:1])
        objects = list(_find_objects(sample))
        self.in_json = SAMPLE_ARGUMENTS in objects
        # The key of the arguments in the JSON of a call.
        self.keys = [
            key for each in objects for key, value in each.items() if value == SAMPLE_ARGUMENTS
        ]

    def check(self, text: str, answer: str, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return the items of a marked text, with errors in place of calls that it does not hold,
        and one after them if a call was not read; `answer` is the text beside the calls."""
        calls = [item for item in items if isinstance(item, ToolCall)]
        try:
            right = self._find_written(
                mend_text(text), answer, calls, alone=len(calls) == len(items)
            )
        except EqualKeysError as error:
            items, right = [ParseError(f"tool call is not valid JSON: {error}")], []
        checked = [_OTHER if item in calls and item not in right else item for item in items]
        if max((text.count(mark) for mark in self.openings), default=0) > len(items):
            checked.append(ParseError(_UNREAD.format(self.begin)))
        return tuple(checked)

    def _find_written(
        self, text: str, answer: str, calls: Sequence[ToolCall], *, alone: bool
    ) -> Sequence[ToolCall]:
        if not calls:
            return ()
        if self.in_json:
            written = {_spell(value) for value in _find_objects(text)}
            return [call for call in calls if _holds(text, written, call)]
        said, again = _count(text) - _count(answer), _count(self._write(calls))
        return calls if said == again or (not alone and again <= said) else ()


def _holds(text: str, written: set[str], call: ToolCall) -> bool:
    arguments = json.loads(call.arguments_json)
    return call.name in text and (not arguments or _spell(arguments) in written)


def _find_objects(text: str) -> Iterator[Any]:
    """Yield every JSON object of a text, and those inside it. Raises EqualKeysError."""
    failures, begin = 0, text.find("{")
    while begin >= 0 and failures <= _MOST_FAILURES:
        try:
            value, end = DECODER.raw_decode(text, begin)
        except EqualKeysError:
            raise
        except (ValueError, RecursionError):
            failures, end = failures + 1, begin + 1
        else:
            yield from _find_inside(value)
        begin = text.find("{", end)


def _find_inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, (dict, list)):
            yield from _find_inside(each)


def _spell(value: Any) -> str:
    """Spell a value so that 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


def _count(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text))
