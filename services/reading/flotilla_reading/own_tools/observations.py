"""What tools answer of a state, twice the same: what differs between two plays, or names the time,
is left out of what a task expects. Pure."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from flotilla_reading.own_tools.written.verifier import answers_as, lines_of

# Folders of episodes have another name at each gateway.
_FOLDERS = re.compile(r"flotilla-(?:episodes|scratch)-")
# How a reader shows what is no text; verifiers do not see it.
_MEDIA = re.compile(r"^\[[\w.+-]+/[\w.+-]+[,\]]", re.MULTILINE)
_EPOCH = re.compile(r"(?<!\d)\d{10}(?:\d{3})?(?:\.\d+)?(?!\d)")
# Beyond it an answer is no state that a person would look through.
_MOST_CHARACTERS = 20_000

# Lines of a pattern: texts with gaps between them.
Pattern = list[list[str]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A call of a tool that only reads."""

    tool: str
    arguments: Mapping[str, Any]

    @property
    def identity(self) -> str:
        return f"{self.tool} {json.dumps(self.arguments, sort_keys=True)}"


@dataclass(frozen=True, slots=True)
class Observation:
    """What a probe was answered: lines, or None if the call failed. `usable` is False if a verifier
    would not see the same."""

    lines: tuple[str, ...] | None
    usable: bool = True


def observe(outcome: str, text: str) -> Observation:
    """Return what was seen, as a verifier sees it."""
    if outcome == "tool_error":
        return Observation(None)
    usable = (
        outcome == "ok"
        and len(text) <= _MOST_CHARACTERS
        and not _FOLDERS.search(text)
        and not _MEDIA.search(text)
    )
    if not usable:
        return Observation(None, usable=False)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = text
    return Observation(tuple(lines_of(answer)))


def find_pattern(first: Observation, second: Observation, now: datetime) -> Pattern | None:
    """Return what two plays of the same calls have in common; None if that is no pattern. Words
    that differ, and those that name the present, become gaps."""
    assert first.lines is not None
    assert second.lines is not None
    if len(first.lines) != len(second.lines) or any(_names_day(line, now) for line in first.lines):
        return None
    both = Counter(first.lines) & Counter(second.lines)
    rest = [list((Counter(lines) - both).elements()) for lines in (first.lines, second.lines)]
    pattern: Pattern = []
    for one, other in [*((line, line) for line in both.elements()), *zip(*rest, strict=True)]:
        texts = _find_texts(one, other, now)
        if texts is None:
            return None
        pattern.append(texts)
    return pattern


def expect(first: Observation, second: Observation, now: datetime) -> tuple[bool, Pattern | None]:
    """Return whether two plays agree, and the lines that both answer; None if both fail."""
    if not (first.usable and second.usable) or (first.lines is None) != (second.lines is None):
        return False, None
    if first.lines is None:
        return True, None
    pattern = find_pattern(first, second, now)
    return pattern is not None, pattern


def is_met(pattern: Pattern | None, seen: Observation) -> bool:
    return answers_as(pattern, None if seen.lines is None else list(seen.lines))


def _find_texts(one: str, other: str, now: datetime) -> list[str] | None:
    """Return the texts of a line around the words that may differ."""
    words, others = re.split(r"(\s+)", one), re.split(r"(\s+)", other)
    if len(words) != len(others):
        return None
    texts = [""]
    for word, another in zip(words, others, strict=True):
        if word == another and not names_moment(word, now):
            texts[-1] += word
        elif word.strip() and another.strip():
            texts.append("")
        else:
            return None
    # A line of gaps alone says nothing.
    return texts if len(texts) == 1 or "".join(texts).strip() else None


def names_moment(word: str, now: datetime) -> bool:
    """Return True if a word holds a date or a time of today."""
    days = [now + timedelta(days=away) for away in (-1, 0, 1)]
    names = [day.strftime(form) for day in days for form in ("%Y-%m-%d", "%A")]
    if any(name in word for name in names):
        return True
    seconds = (float(found[0][:10]) for found in _EPOCH.finditer(word))
    return any(abs(each - now.timestamp()) < 86_400 for each in seconds)


def _names_day(line: str, now: datetime) -> bool:
    """Return True if a line names today in words, as in "Mon Nov 30 2026" or "30 November"."""
    day = str(now.day)
    month = rf"{now.strftime('%b')}[a-z]*\.?"
    pattern = rf"\b(?:{month}\s+0?{day}|0?{day}\.?\s+{month})\b"
    return re.search(pattern, line, re.IGNORECASE) is not None
