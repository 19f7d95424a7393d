"""Text of sampled tokens in which a tag is one only where its token was sampled."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from services.rollout.ports import Tokenizer

# Set into text that only looks like a tag which is a token of its own. No text of tokens has it.
_BREAK = "\udfff"


def mark_text(tokenizer: Tokenizer, ids: Sequence[int], tags: Iterable[str]) -> str:
    """Return the text of `ids`, in which no tag is one that was spelled in ordinary tokens.

    That is for tags which are tokens of their own; others are text like any other."""
    known = {tag: tokenizer.encode(tag) for tag in tags}
    tokens = {found[0]: tag for tag, found in known.items() if len(found) == 1}
    text, start = "", 0
    for position, token in enumerate([*ids, None]):
        if token is None or token in tokens:
            text += _break_tags(tokenizer.decode(ids[start:position]), tokens.values())
            text += tokens[token] if token is not None else ""
            start = position + 1
    return text


def mend_text(text: str) -> str:
    """Return a marked text as it was spelled."""
    return text.replace(_BREAK, "")


def mend_json(text: str) -> str:
    """Return JSON of marked texts as JSON of texts as they were spelled."""
    # As it is escaped; that may be half of another character, too.
    return json.dumps(_mend_value(json.loads(text))) if "\\udfff" in text else text


def _mend_value(value: Any) -> Any:
    if isinstance(value, str):
        return mend_text(value)
    if isinstance(value, list):
        return [_mend_value(each) for each in value]
    if isinstance(value, dict):
        return {mend_text(key): _mend_value(each) for key, each in value.items()}
    return value


def _break_tags(text: str, tags: Iterable[str]) -> str:
    for tag in tags:
        text = text.replace(tag, tag[:1] + _BREAK + tag[1:])
    return text
