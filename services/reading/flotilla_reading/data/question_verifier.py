# pyright: basic
"""Verifier of a question with one right answer, which stands in its source: tasks that are made
from rows of others have a copy of this file with their answer in it."""

import re
from fractions import Fraction

EXPECTED = ""
NUMBER = re.compile(r"-?[0-9]{0,40}(\.[0-9]{1,40})?(/[0-9]{1,40})?")
FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
# What changes how an answer looks, and not what it says.
LOOKS = re.compile(r"\\left|\\right|\\[!,;: ]|\$|\s|(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


def final_of(text):
    """The content of the last \\boxed{...}; without one, the line behind the last "####"."""
    start = text.rfind("\\boxed{")
    if start < 0:
        _, mark, rest = text.rpartition("####")
        return rest.strip().split("\n")[0] if mark else None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at]
    return None


def plain(answer):
    """An answer without what only changes its looks; numbers as fractions."""
    text = LOOKS.sub("", answer).rstrip(".")
    text = FRACTION.sub(r"\1/\2", text)
    if text and NUMBER.fullmatch(text):
        try:
            return Fraction(text)
        except (ValueError, ZeroDivisionError):
            return text
    return text


def validate_task(env, final_answer=None) -> dict:
    """Passes when the final answer is the expected one, as text or as a number."""
    found = final_of(final_answer or "")
    if found is None:
        errors, successes = ['[X] neither \\boxed{...} nor "####" marks an answer'], []
    elif plain(found) == plain(EXPECTED):
        errors, successes = [], [f"[C] the answer is {found}"]
    else:
        errors, successes = [f"[X] the answer is {found}, expected {EXPECTED}"], []
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
