"""Whether a policy may have written what a verifier printed. Pure.

It may have written a part of a line, in another spelling or encoding, in pieces, and have left the
rest to the verifier; so words are compared, not lines. In doubt it was the policy: results that are
doubted count for nothing, so that nobody gains by writing such words.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from services.common.parsing import Limits, ParseError, parse_json
from services.env_gateway.ports import Submission
from services.env_gateway.writings import Phrase, Writings, readings

_NO_LETTERS = re.compile(r"[^a-z]+")
_WORD = re.compile(r"[^\W_]+")
_ENDS_AS_A_RESULT = re.compile(r":\s*[01]$")
# Between two texts of a list, as Python and JSON write it.
_PARTING = re.compile(r"""["']\s*,\s*["']""")
_EDGE_CHARS = 20
# Of a longer or deeper one, every word counts as the policy's.
_CONVERSATION = Limits(bytes=2**25, values=2**17)


class Authorship:
    """What `writings` explain of a verifier's output."""

    def __init__(self, writings: Writings) -> None:
        self._writings = writings

    @property
    def chars(self) -> int:
        return self._writings.chars

    def explains(self, phrase: Phrase) -> bool:
        """Whether the words may come from what the policy wrote or was shown."""
        if self._writings.too_many or phrase in self._writings.shown_phrases:
            return True
        return any(phrase in text for text in self._letters) or _put_together(phrase, self._words)

    def explains_app(self, line: str, name: str, value: str) -> bool:
        """Whether `App NAME: VALUE` may: whole, from its start, or to its end."""
        if self._writings.too_many:
            return True
        told = f"{spelt(name).rstrip()} "
        if f" app{told.rstrip()}" in self._spelt or f"{told.lstrip()}{value} " in self._spelt:
            return True
        if f" app{told}{value} " in self._shown:
            return True
        whole = _plain(line)
        return whole.startswith(self._starts) or whole.endswith(self._ends)

    def explains_frame(self, before: str, after: str) -> bool:
        """Whether what stands around a result, so that it is none, may: by the next word."""
        if self._writings.too_many:
            return True
        return self._touches(before, lambda words: f" {words[-1]}") or self._touches(
            after, lambda words: f"{words[0]} "
        )

    def _touches(self, text: str, nearest: Callable[[list[str]], str]) -> bool:
        if words := spelt(text).split():
            return nearest(words) in self._spelt
        return bool(text.strip()) and any(text.strip() in one for one in self._readings)

    def explains_parting(self, items: Sequence[str]) -> bool:
        """Whether two items of a list may be one, parted by quotation marks of the policy's."""
        if self._writings.too_many:
            return True
        neighbours = list(pairwise(items))
        return any(
            first.endswith(before[-_EDGE_CHARS:]) and second.startswith(after[:_EDGE_CHARS])
            for before, after in self._parted
            for first, second in neighbours
        )

    @cached_property
    def _readings(self) -> list[str]:
        texts: dict[str, None] = {}
        for written in self._writings.written.values():
            texts.update(dict.fromkeys(written))
            # As it is typed bit by bit.
            texts["".join(written)] = None
        return list(dict.fromkeys(reading for text in texts for reading in readings(text)))

    @cached_property
    def _letters(self) -> set[str]:
        return {_NO_LETTERS.sub("", folded) for folded in map(str.casefold, self._spellings())}

    @cached_property
    def _words(self) -> set[str]:
        words = {word for text in self._spellings() for word in text.casefold().split()}
        return {letters for word in words if (letters := _NO_LETTERS.sub("", word))}

    @cached_property
    def _spelt(self) -> str:
        return "\n".join(spelt(text) for text in self._readings)

    @cached_property
    def _shown(self) -> str:
        return "\n".join(spelt(line) for line in self._writings.shown_lines)

    @cached_property
    def _lines(self) -> set[str]:
        return {_plain(line) for text in self._readings for line in text.splitlines()}

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        return tuple(line for line in self._lines if line.startswith("app "))

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        return tuple(line for line in self._lines if _ENDS_AS_A_RESULT.search(line))

    @cached_property
    def _parted(self) -> list[tuple[str, str]]:
        return [pair for text in self._readings for pair in pairwise(_PARTING.split(text))]

    def _spellings(self) -> Iterator[str]:
        """With and without the letters that are not of ASCII."""
        for text in self._readings:
            yield text
            if not text.isascii():
                yield unicodedata.normalize("NFKD", text)


def authorship_of(writings: Writings, submission: Submission) -> Authorship:
    """Of an episode at its end: what it wrote and was shown before, and what is submitted."""
    writings, task = writings.copy(), submission.task
    for text in (task.prompt, task.current_date, *task.variables.values()):
        writings.showed(text)
    if submission.final_answer is not None:
        writings.wrote("final_answer", submission.final_answer)
    for message in _messages(submission.conversation):
        writings.told(message)
    return Authorship(writings)


NOBODY = Authorship(Writings())


def spelt(text: str) -> str:
    """Its words alone, in one case and parted by single spaces; a space at either end."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    # One by one, since a search for all of them at once holds the event loop up from any thread.
    return f" {' '.join(found[0] for found in _WORD.finditer(folded))} "


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _messages(conversation: str | None) -> Iterable[object]:
    if conversation is None:
        return ()
    try:
        messages: object = parse_json(conversation, _CONVERSATION)
    except ParseError:
        return (conversation,)
    return messages if isinstance(messages, list) else (messages,)


def _put_together(phrase: str, words: set[str]) -> bool:
    """Whether the end of a word, whole words and the start of another make the phrase."""
    size = len(phrase)
    starts = {i for i in range(1, size) if any(word.endswith(phrase[:i]) for word in words)}
    reached = set(starts)
    for i in range(1, size):
        if i in reached:
            reached |= {j for j in range(i + 1, size) if phrase[i:j] in words}
    return any(word.startswith(phrase[i:]) for i in reached for word in words)
