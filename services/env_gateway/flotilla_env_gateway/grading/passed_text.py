"""Text that the gateway passed in one episode, reduced to what a grade depends on.

A verifier whose judge failed prints a phrase, and its zero means nothing. It may also print the
answer, or rows of the world, in which the policy wrote that phrase."""

import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from flotilla_common.text.parsing import run_aside
from flotilla_env_gateway.ports import Part, Text

# The two words may be separated by signs, escapes or the name of a field, but not by other words.
PHRASE = r"judge(?:\\u[0-9a-f]{4}|\\[nrt]|[\W\d_]|\"\w{1,30}\":){0,40}error"
_PHRASE = re.compile(PHRASE, re.IGNORECASE)
# Python runs each search to its end, and other threads wait. No phrase is longer than the overlap.
_SLICE_CHARS, _OVERLAP_CHARS = 2**16, 2**11


class PassedText:
    """Digest of an episode's text of any length: whether the phrase of a failed judge was in
    it."""

    def __init__(self) -> None:
        self.has_phrase = False

    def note_text(self, text: str) -> None:
        self.has_phrase = self.has_phrase or contains_phrase(text)

    def note_call(self, arguments: Mapping[str, Any]) -> None:
        """Note a tool call's arguments, names included."""
        self.note_text(json.dumps(arguments, ensure_ascii=False))

    async def note_parts(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, Text):
                await run_aside(len(part.text), partial(self.note_text, part.text))


def contains_phrase(text: str) -> bool:
    """Return True if the phrase is in the text, in any case."""
    for start in range(0, len(text), _SLICE_CHARS):
        piece = text[start : start + _SLICE_CHARS + _OVERLAP_CHARS]
        if "judge" in piece.lower() and _PHRASE.search(piece):
            return True
    return False
