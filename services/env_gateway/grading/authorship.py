"""Authorship of a verifier's output: detects text that the policy may have written. Pure.

The policy may have written part of a line, in another spelling or encoding, or in pieces
that the verifier completed; so words are compared, not lines. Doubt counts against the
policy: doubtful results count for nothing, so writing such words gains nothing."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from services.common.parsing import ParseError, TextLimits, parse_json
from services.env_gateway.grading.policy_writings import (
    KEYS,
    Phrase,
    PolicyWritings,
    decode_readings,
)
from services.env_gateway.grading.text_normalization import (
    list_forms,
    mark_results,
    normalize_spaces,
    normalize_words,
    squeeze_words,
    strip_signs,
)
from services.env_gateway.ports import Submission

_NO_LETTERS = re.compile(r"[^a-z]+")
# Pieces of words that other words, such as a tag's, may separate.
_PIECE = re.compile(r"[a-z]{2,}")

_ENDS_AS_A_RESULT = re.compile(r":\s*[01]$")
# Separator of two texts of a list in Python and JSON.
_PARTING = re.compile(r"""["']\s*,\s*["']""")
_EDGE_CHARS = 20
_PARTINGS_KEPT = 1000
# In a longer or deeper one, every word counts as the policy's.
_CONVERSATION = TextLimits(bytes=2**25, values=2**17)


class Authorship:
    """Matcher of a verifier's output against the policy's `writings`."""

    def __init__(self, writings: PolicyWritings) -> None:
        self._writings = writings

    @property
    def chars(self) -> int:
        return self._writings.chars

    @property
    def _all(self) -> bool:
        """True if so much was written, or so deeply encoded, that any word may be the policy's."""
        return self._writings.too_many or not self._read[1]

    def explains_phrase(self, phrase: Phrase) -> bool:
        """Return True if the phrase may come from text that the policy wrote or was shown."""
        if self._all or phrase in self._writings.shown_phrases:
            return True
        return any(phrase in text for text in self._letters_alone) or _is_composed_of(
            phrase, self._single_words
        )

    def explains_app(self, line: str, name: str, value: str) -> bool:
        """Return True if the policy may have written `App NAME: VALUE`: all of it, its start,
        or its end."""
        if self._all or f" app{normalize_words(name).rstrip()} {value} " in self._shown_words:
            return True
        if not normalize_words(name).strip() and (
            name.strip() in self._joined or " app" in self._written_words
        ):
            return True
        if any(self._holds(one, value) for one in list_forms(f"app {name}: {value}")):
            return True
        if self._names_app and any(piece.startswith(squeeze_words(name)) for piece in self._pieces):
            return True
        lines = [normalize_spaces(one) for one in list_forms(line)]
        return any(
            one.startswith(self._result_starts) or one.endswith(self._result_ends) for one in lines
        )

    def _holds(self, line: str, value: str) -> bool:
        """Return True if the policy wrote a line without its value, or without the word App."""
        marked = mark_results(line).removeprefix("app:")
        name = marked.removesuffix(f":{value}:")
        return bool(name) and (f"app:{name}" in self._marked or f"{name}:{value}:" in self._marked)

    def explains_frame(self, before: str, after: str) -> bool:
        """Return True if the policy may have written the text around a result that hides it;
        the nearest word decides."""
        if self._all:
            return True
        if before.isspace() and f"\n{before}" in f"\n{self._joined}":
            return True
        if after.isspace() and after in self._joined:
            return True
        return self._touches_nearest_word(
            before, lambda words: f" {words[-1]}"
        ) or self._touches_nearest_word(after, lambda words: f"{words[0]} ")

    def _touches_nearest_word(self, text: str, nearest: Callable[[list[str]], str]) -> bool:
        forms = [
            words
            for one in list_forms(text)
            for words in (normalize_words(one).split(), strip_signs(one).split())
        ]
        if any(words and nearest(words) in self._written_words for words in forms):
            return True
        return bool(text.strip()) and not any(forms) and text.strip() in self._joined

    def explains_parting(self, items: Sequence[str]) -> bool:
        """Return True if two items of a list may be one item, split by quotation marks that
        the policy wrote."""
        if self._all or len(self._parted_pairs) > _PARTINGS_KEPT:
            return True
        neighbours = list(pairwise(items))
        return any(
            first.endswith(before) and second.startswith(after)
            for before, after in self._parted_pairs
            for first, second in neighbours
        )

    @cached_property
    def _read(self) -> tuple[list[str], bool]:
        texts: dict[str, None] = {}
        for written in self._writings.written.values():
            texts.update(dict.fromkeys(written))
            # As it is typed piece by piece.
            texts["".join(written)] = None
        found = [decode_readings(text) for text in texts]
        every = dict.fromkeys(reading for texts, _ in found for reading in texts)
        return list(every), all(complete for _, complete in found)

    @property
    def _all_readings(self) -> list[str]:
        return self._read[0]

    @cached_property
    def _joined(self) -> str:
        return "\n".join(self._all_readings)

    @cached_property
    def _letters_alone(self) -> set[str]:
        return {_NO_LETTERS.sub("", text) for text in self._forms}

    @cached_property
    def _single_words(self) -> set[str]:
        words = {_NO_LETTERS.sub("", word) for text in self._forms for word in text.split()}
        pieces = {found[0] for text in self._forms for found in _PIECE.finditer(text)}
        return (words | pieces) - {""}

    @cached_property
    def _forms(self) -> list[str]:
        return list(dict.fromkeys(form for text in self._all_readings for form in list_forms(text)))

    @cached_property
    def _written_words(self) -> str:
        return "\n".join(
            one for text in self._forms for one in (normalize_words(text), strip_signs(text))
        )

    @cached_property
    def _marked(self) -> str:
        return "\n".join(
            mark_results(one) for text in self._forms for one in (text, strip_signs(text))
        )

    @cached_property
    def _shown_words(self) -> str:
        return "\n".join(normalize_words(line) for line in self._writings.shown_lines)

    @cached_property
    def _pieces(self) -> set[str]:
        """Separate texts, from which a verifier may assemble a line."""
        return {squeezed for text in self._values if (squeezed := squeeze_words(text))}

    @cached_property
    def _names_app(self) -> bool:
        return any(squeeze_words(text.rpartition("\n")[2]) == "app" for text in self._values)

    @property
    def _values(self) -> Iterator[str]:
        """The written texts except the names of fields."""
        for where, texts in self._writings.written.items():
            if not where.endswith(KEYS):
                yield from texts

    @cached_property
    def _written_lines(self) -> set[str]:
        return {normalize_spaces(line) for text in self._forms for line in text.splitlines()}

    @cached_property
    def _result_starts(self) -> tuple[str, ...]:
        return tuple(line for line in self._written_lines if line.startswith("app "))

    @cached_property
    def _result_ends(self) -> tuple[str, ...]:
        return tuple(line for line in self._written_lines if _ENDS_AS_A_RESULT.search(line))

    @cached_property
    def _parted_pairs(self) -> set[tuple[str, str]]:
        texts = (pair for text in self._all_readings for pair in pairwise(_PARTING.split(text)))
        return {(before[-_EDGE_CHARS:], after[:_EDGE_CHARS]) for before, after in texts}


def authorship_of(writings: PolicyWritings, submission: Submission) -> Authorship:
    """Build the authorship of an episode at its end: everything that it wrote and was shown so
    far, and the submission."""
    writings, task = writings.copy(), submission.task
    for text in (task.prompt, task.current_date, *task.variables.values()):
        writings.add_shown(text)
    if submission.final_answer is not None:
        writings.add_written("final_answer", submission.final_answer)
    for message in _parse_messages(submission.conversation):
        writings.add_message(message)
    return Authorship(writings)


NO_AUTHOR = Authorship(PolicyWritings())


def _parse_messages(conversation: str | None) -> Iterable[object]:
    if conversation is None:
        return ()
    try:
        messages: object = parse_json(conversation, _CONVERSATION)
    except ParseError:
        return (conversation,)
    return messages if isinstance(messages, list) else (messages,)


def _is_composed_of(phrase: str, words: set[str]) -> bool:
    """Return True if the end of a word, whole words and the start of another can form the
    phrase."""
    size = len(phrase)
    starts = {i for i in range(1, size) if any(word.endswith(phrase[:i]) for word in words)}
    reached = set(starts)
    for i in range(1, size):
        if i in reached:
            reached |= {j for j in range(i + 1, size) if phrase[i:j] in words}
    return any(word.startswith(phrase[i:]) for i in reached for word in words)
