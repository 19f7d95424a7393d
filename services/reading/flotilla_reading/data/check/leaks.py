"""Answers that a task gives away: values that only a solver can know, in the prompt or in the first
observation. Pure.

Most values of a solution also stand in the prompt, rightly: they are what the task asks for. A
value can leak only if the solution *learned* it: a result showed it before the first call that used
it. If that result showed others of its kind, the prompt may name the one that is meant, as in
"cancel order 4711"; then only words that announce an answer count. Numbers coincide, so a short one
counts only where it is named for what it is."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flotilla_reading.play.solutions import SolutionCall
from flotilla_reading.play.world import Step

# Names of arguments that hold what an environment made up.
_ID_NAME = re.compile(
    r"(?:^|[_-])(?:id|ids|uuid|guid|ref|reference|token|code|number|key|sku|slug)$|I[dD]$"
)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
# Words, also within a name such as EXPECTED_ANSWER.
_CUE = r"(?<![^\W_])(?:answers?|solution|hint|ground[ _-]?truth)(?![^\W_])"
# Announces an answer that is no single letter or word, such as those to choose from.
_RESULT_CUE = r"\b(?:expected|correct|result|spoiler)(?:[ _](?:answer|number|result|value))?\b"
# What may stand between a name and its value.
_FILLER = r"[\s\"'`:=#>*(\[{]*(?:\b(?:it|is|are|should be|must be|equals?|value)\b[\s\"'`:=#(]*)*"
# What may follow the name of a thing that has an id.
_NUMBER = r"(?:\s+(?:number|no\.?|nr\.?|ref(?:erence)?\b))?"
# After a value: it is not part of a longer one, nor the first of a choice.
_END = r"(?![\w-]|[.,]\d|[\s\"'`)\]]*(?:/|\||\bor\b)|\s*,\s*\w{1,9}\s*(?:,|\bor\b))"
# From so many characters on, a value with a digit is no coincidence.
_LONG = 5


@dataclass(frozen=True, slots=True)
class Learned:
    """An argument of a step that is an id, and that a result showed first; `alone` if it showed no
    other."""

    step: Step
    name: str
    value: str
    alone: bool


def find_leak(prompt: str, observation: str, steps: Sequence[Step], answer: str | None) -> str:
    """Return what is given away, and where; "" if nothing is. `answer` is the final answer if it is
    what is graded."""
    for each in learned_values(steps):
        what = f"{each.name} {each.value}, which only a call can tell"
        if shown := _find_value(prompt, each):
            return f"the prompt gives away {what}: {shown!r}"
        if shown := _search([_announced(each.value)], observation):
            return f"the first observation gives away {what}: {shown!r}"
    results = "\n".join(step.text for step in steps)
    for where, text in (("prompt", prompt), ("first observation", observation)):
        if answer and (shown := _find_answer(text, answer, results)):
            return f"the {where} gives away the answer: {shown!r}"
    return ""


def learned_values(steps: Sequence[Step]) -> Iterator[Learned]:
    """Yield the arguments that a solution learned before it used them."""
    used: set[str] = set()
    shown: list[str] = []
    for step in steps:
        given = [(name, str(value)) for name, value in named_values("", step.call.arguments)]
        for name, value in given:
            sources = [text for text in shown if _word(value).search(text)]
            if sources and value not in used and _ID_NAME.search(name):
                alone = all(_is_alone(value, text) for text in sources)
                yield Learned(step, name, value, alone)
        used.update(value for _, value in given)
        if step.outcome == "ok":
            shown.append(step.text)


def named_values(name: str, value: Any) -> Iterator[tuple[str, str | int]]:
    """Yield the texts and whole numbers within a value, each with the name that it has."""
    if isinstance(value, Mapping):
        for key, each in cast("Mapping[str, Any]", value).items():
            yield from named_values(key, each)
    elif isinstance(value, list | tuple):
        for each in cast("Sequence[Any]", value):
            yield from named_values(name, each)
    elif isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
        yield name, value


def ids_alone(steps: Sequence[Step], number: int) -> list[str]:
    """Return the names of a step's arguments that are ids, each the only one that was shown."""
    learned = (each for each in learned_values(steps) if each.step is steps[number])
    return [each.name for each in learned if each.alone and each.name in each.step.call.arguments]


def shows_id_of(step: Step, call: SolutionCall) -> bool:
    """Return True if a step's result shows an id that a call is given."""
    given = named_values("", call.arguments)
    ids = [str(value) for name, value in given if _ID_NAME.search(name)]
    return step.outcome == "ok" and any(_word(value).search(step.text) for value in ids)


def shown_ids(text: str) -> list[tuple[str, str | int]]:
    """Return the ids in a result, by name; none if it is no JSON."""
    try:
        return [each for each in named_values("", json.loads(text)) if _ID_NAME.search(each[0])]
    except (ValueError, RecursionError):
        return []


def _is_alone(value: str, text: str) -> bool:
    """Return True if a result shows the value, and no other under the same name."""
    try:
        leaves = list(named_values("", json.loads(text)))
    except (ValueError, RecursionError):
        return False
    names = {name for name, each in leaves if str(each) == value}
    return {str(each) for name, each in leaves if name in names} == {value}


def _find_value(prompt: str, learned: Learned) -> str:
    """Return where the prompt names a value for what it is, or shows one that is too long for a
    coincidence."""
    name, value = re.escape(learned.name), re.escape(learned.value)
    tool = re.escape(learned.step.call.name)
    patterns = [_announced(learned.value), rf"\b{tool}\s*\(\s*[\"'`]?{value}{_END}"]
    if "_" in learned.name or learned.name != learned.name.lower():
        # As code would write it, also within a longer name.
        patterns.append(rf"(?<![^\W_]){name}[\"'`]?\s*[=:]\s*[\"'`]?{value}{_END}")
    if learned.alone:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|[_-]", " ", learned.name).split()
        said = (words, words[-1:], words[:-1] or words)
        spaced = [r"[\s_-]*".join(map(re.escape, each)) for each in said]
        patterns += [rf"\b{each}{_NUMBER}{_FILLER}{value}{_END}" for each in spaced]
        patterns += [rf"/{each}s?/{value}{_END}" for each in spaced]
        if _is_long(learned.value):
            patterns.append(_word(learned.value).pattern)
    return _search(patterns, prompt)


def _announced(value: str) -> str:
    return rf"{_CUE}[^.?!\n]{{0,60}}?(?<![\w.-]){re.escape(value)}{_END}"


def _find_answer(text: str, answer: str, results: str) -> str:
    """Return where a text announces an answer, or its final value."""
    final = _final_value(answer)
    value = rf"{re.escape(final)}{_END}"
    # `####` and `\boxed` announce the result of a calculation.
    patterns = [rf"(?:{_CUE}{_FILLER}|####\s*|\\boxed\{{){value}"]
    if any(character.isdigit() for character in final):
        patterns.append(rf"{_RESULT_CUE}\s*(?:\bis\b|[:=])\s*{value}")
    if final != answer.strip():
        patterns.append(re.escape(answer.strip()))
    if _is_long(final) and _word(final).search(results):
        patterns.append(_word(final).pattern)
    return _search(patterns, text)


def _final_value(answer: str) -> str:
    """Return what an answer comes to: what follows ####, stands in a box, or all of it."""
    for pattern in (r"####\s*(\S.*?)\s*$", r"\\boxed\{([^{}]+)\}"):
        if found := re.findall(pattern, answer, re.MULTILINE):
            return str(found[-1])
    return answer.strip()


def _is_long(value: str) -> bool:
    has_digit = any(character.isdigit() for character in value)
    return has_digit and len(value) >= _LONG and not _DATE.fullmatch(value)


def _word(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.-]){re.escape(value)}(?![\w-]|\.\d)")


def _search(patterns: Sequence[str], text: str) -> str:
    for pattern in patterns:
        if found := re.search(pattern, text, re.IGNORECASE):
            return found[0]
    return ""
