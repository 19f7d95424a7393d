"""Calls that do not begin with their own token, as Llama's: text with such a start is no answer."""

import re

from flotilla_rollout.dialects.call_values import error_reason
from flotilla_rollout.dialects.tagged_calls import DECODER
from flotilla_rollout.dialects.turns import ParseError

# Models put it before their calls, even if the template does not.
PYTHON_TAG = "<|python_tag|>"
_OPENING = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')


def find_unread_call(answer: str, *, tagged: bool) -> ParseError | None:
    """Return the error for a text that looks like a call but could not be read as one; `tagged` is
    True if the tag preceded it."""
    if _OPENING.match(answer):
        text = answer.lstrip()
        try:
            _, end = DECODER.raw_decode(text)
        except RecursionError:
            return ParseError("tool call is nested too deeply")
        except ValueError as error:
            return ParseError(f"tool call is not valid JSON: {error_reason(error)}")
        if text[end:].strip():
            return ParseError(
                "expected nothing after the JSON of a tool call: make one call a turn"
            )
    if tagged:
        return ParseError("tool call is not in the form of this model's calls")
    return None
