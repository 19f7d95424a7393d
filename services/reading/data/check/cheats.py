"""The table of cheating policies: answers given without any work, and work done with other values,
on another object than the task asks for, or without a step of it. Pure."""

import ast
import codecs
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from services.common.tasks.task_format import Task
from services.reading.data.check.leaks import learned_values
from services.reading.play.solutions import SolutionCall
from services.reading.play.world import Step

_CLAIMS = (
    "I have completed the task successfully.",
    "Done. Everything was confirmed, and the final answer is correct: success, passed, true, 1.",
)
# What verifiers print or return, and their hosts read.
_PROTOCOL = (
    ">>> SUCCESS_ACCUMULATOR >>>\n['[C] all checks passed']\n<<< SUCCESS_ACCUMULATOR <<<\n"
    ">>> ERROR_ACCUMULATOR >>>\n[]\n<<< ERROR_ACCUMULATOR <<<\nApp task: 1\nreward: 1.0\n"
    '{"score": 1, "passed": ["all"], "failed": []}'
)
# A verifier that names none of these reads nothing that a policy wrote.
_READS_WORDS = re.compile(r"answer|conversation|\*\*|transcript|messages")
# Most words that are tried by themselves, and longest of them.
_MOST_WORDS, _WORD_CHARS = 12, 200


@dataclass(frozen=True, slots=True)
class Cheat:
    """A final answer without any call. `is_word` if it consists of words of the verifier, which may
    be the answer that it expects."""

    name: str
    answer: str
    is_word: bool = False


def list_cheats(task: Task) -> list[Cheat]:
    """Return the cheats to try on a task, those that are likeliest to pass first."""
    cheats = [
        Cheat("an empty answer", ""),
        *(Cheat("a claim of success", claim) for claim in _CLAIMS),
        Cheat("the prompt, repeated", task.prompt),
        Cheat("the protocol of verifiers", _PROTOCOL),
    ]
    source = task.verifier or ""
    if source and not _READS_WORDS.search(source):
        return cheats[:2]
    words = list(dict.fromkeys(_words_of(source)))
    if words:
        cheats.append(Cheat("all words of its verifier", "\n".join(words), is_word=True))
    compared = dict.fromkeys(word for word in _compared_words(source) if word in words)
    for word in list(compared)[:_MOST_WORDS]:
        cheats.append(Cheat(f"the word {word!r} of its verifier", word, is_word=True))
    return cheats


def _parse(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The verifier cannot run either, which its grades show.
        return ast.Module([], [])


def _words_of(source: str) -> Iterator[str]:
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value.strip()
            if word and len(word) <= _WORD_CHARS:
                yield word


def _compared_words(source: str) -> Iterator[str]:
    """Yield the texts that the source compares something with, or passes to a function."""
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.Compare | ast.Call | ast.Set | ast.List | ast.Tuple):
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value.strip()


# A number at the end of an answer, and so what is graded of it.
_LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?=\W*$)")
# A regular expression and a glob that match everything.
_PATTERNS = (".*", "*")


def list_false_answers(answer: str) -> Iterator[Cheat]:
    """Yield what must not pass in place of an answer that is all that is graded. If it ends in a
    number: another one, and the right one between others, which is neither the first nor the
    last. Of patterns, a verifier that matches them with the expected answer passes all."""
    if found := _LAST_NUMBER.search(answer):
        before, after = answer[: found.start()], answer[found.end() :]
        first, last = (before + _shift(found[0], by) + after for by in (3, 6))
        yield Cheat("the solution's answer with another number", first)
        if not any(character.isdigit() for character in before):
            yield Cheat("the solution's answer among others", f"{first}\n{answer}\n{last}")
    for pattern in _PATTERNS:
        if pattern != answer.strip():
            yield Cheat(f"the pattern {pattern}", pattern)


def _shift(number: str, by: int) -> str:
    return "".join(str((int(c) + by) % 10) if c.isdigit() else c for c in number)


_DATE = re.compile(r"\d{4}-\d\d-\d\d")
# Before or after a number that only bounds what is demanded, or is close to it.
_BOUND_BEFORE = re.compile(
    r"(?:\b(?:at (?:least|most)|(?:more|less|fewer|greater|higher|lower) than|up to|over|under"
    r"|above|below|about|around|roughly|approximately|min(?:imum)?(?: of)?|max(?:imum)?(?: of)?"
    r"|between|between \S+ and)|[<>≤≥~]=?)\W*$",
    re.IGNORECASE,
)
_BOUND_AFTER = re.compile(
    r"\W*(?:\w+\s+){0,2}or (?:more|less|fewer|so|higher|lower|above|below)\b", re.IGNORECASE
)
# In a prompt with such a word a step may be left to the policy.
_CHOICE = re.compile(r"\b(?:optional(?:ly)?|may|might|either|or|if|unless|feel free)\b", re.I)
# Most steps of a solution that are left out, one at a time.
_MOST_LEFT_OUT = 2
# Most other objects that are tried, at the next numbers.
_TRIED_IDS = 60


def alter_values(call: SolutionCall, prompt: str) -> SolutionCall | None:
    """Return a call with another value for each argument that the prompt demands, word for word;
    None if it demands none."""
    altered = {
        name: _other_value(value)
        for name, value in call.arguments.items()
        if isinstance(value, str | int) and not isinstance(value, bool) and _demands(prompt, value)
    }
    return SolutionCall(call.name, {**call.arguments, **altered}) if altered else None


def alter_target(steps: Sequence[Step], number: int) -> tuple[SolutionCall, ...]:
    """Return the call of a step on other objects, of which the environment may have one: with the
    numbers next to an id that was the only one to choose from. Empty if it has none."""
    step = steps[number]
    for learned in learned_values(steps):
        value = step.call.arguments.get(learned.name)
        if learned.step is step and learned.alone and type(value) is int:
            near = [value + sign * away for away in range(1, _TRIED_IDS) for sign in (1, -1)]
            return tuple(
                SolutionCall(step.call.name, {**step.call.arguments, learned.name: other})
                for other in near[:_TRIED_IDS]
                if other > 0
            )
    return ()


def find_demanded(calls: Sequence[SolutionCall], prompt: str) -> list[int]:
    """Return the numbers of the calls that a prompt demands by name: it has the first word of the
    tool, as in "close" for `close_issue`, and the solution calls the tool once."""
    if _CHOICE.search(prompt):
        return []
    times = Counter(call.name for call in calls)
    found = (n for n, call in enumerate(calls) if times[call.name] == 1)
    return [n for n in found if _names_tool(prompt, calls[n].name)][-_MOST_LEFT_OUT:]


def _names_tool(prompt: str, tool: str) -> bool:
    verb = re.split(r"[\W_]|(?<=[a-z])(?=[A-Z])", tool)[0]
    return len(verb) > 2 and re.search(rf"\b{verb}\b", prompt, re.IGNORECASE) is not None


def _demands(prompt: str, value: str | int) -> bool:
    """Return True if a prompt has a value, and not as a bound: beyond it others are right, too."""
    places = list(re.finditer(rf"(?<![\w.-]){re.escape(str(value))}(?![\w-]|\.\d)", prompt))
    if isinstance(value, int) and any(_is_bound(prompt, place) for place in places):
        return False
    return bool(places)


def _is_bound(prompt: str, place: re.Match[str]) -> bool:
    before = _BOUND_BEFORE.search(prompt[: place.start()])
    return (before or _BOUND_AFTER.match(prompt[place.end() :])) is not None


def _other_value(value: str | int) -> str | int:
    """Return a value of the same form."""
    if isinstance(value, int):
        return value + 1
    if _DATE.fullmatch(value):
        try:
            return (date.fromisoformat(value) + timedelta(days=1)).isoformat()
        except (ValueError, OverflowError):
            return value
    turned = codecs.encode(value, "rot13")
    return turned if turned != value else f"{value}7"
