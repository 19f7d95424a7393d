"""Text of sampled tokens in which a tag counts only if its token was sampled."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from flotilla_rollout.tokenizer_port import Tokenizer

# Inserted into text that only looks like a tag with its own token. No decoded text contains it.
BREAK = "\udfff"


class TagMarker:
    """Decoder of sampled tokens into text in which no tag is spelled in ordinary tokens.

    This covers tags that are single tokens; others are ordinary text."""

    def __init__(self, tokenizer: Tokenizer, tags: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        known = {tag: tokenizer.encode(tag) for tag in sorted(tags, key=len, reverse=True)}
        self._tokens = {found[0]: tag for tag, found in known.items() if len(found) == 1}

    def mark(self, ids: Sequence[int]) -> str:
        text, start = "", 0
        for position in [n for n, token in enumerate(ids) if token in self._tokens]:
            text += self._decode(ids, start, position) + self._tokens[ids[position]]
            start = position + 1
        return text + self._decode(ids, start, len(ids))

    def _decode(self, ids: Sequence[int], start: int, end: int) -> str:
        """Decode a run without tags after the tag before it: some vocabularies drop the leading
        space of a text."""
        if start == end:
            return ""
        tag = self._tokens[ids[start - 1]] if start else ""
        text = self._tokenizer.decode(ids[start - bool(tag) : end]).removeprefix(tag)
        for each in self._tokens.values():
            if each in text:
                text = text.replace(each, each[:1] + BREAK + each[1:])
        return text


def mend_text(text: str, mark: str = BREAK) -> str:
    """Return a marked text in its original spelling."""
    return text.replace(mark, "")


def mend_json(text: str) -> str:
    """Return JSON of marked texts as JSON of their original spelling."""
    # In its escaped form, which may also be half of another character.
    return json.dumps(mend_value(json.loads(text))) if "\\udfff" in text else text


def mend_value(value: Any, mark: str = BREAK) -> Any:
    """Return a parsed value with its marked texts in their original spelling."""
    if isinstance(value, str):
        return mend_text(value, mark)
    if isinstance(value, list):
        return [mend_value(each, mark) for each in value]
    if isinstance(value, dict):
        return {mend_text(key, mark): mend_value(each, mark) for key, each in value.items()}
    return value
