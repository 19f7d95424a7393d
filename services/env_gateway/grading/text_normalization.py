"""Normal forms of a text for comparing words: folded, without signs, without spaces. Pure."""

import re
import unicodedata

_WORD = re.compile(r"[^\W_]+")
_GAPS = re.compile(r"[\W_]+([01])(?![^\W_])|[\W_]+")
_SIGNS = re.compile(r"[^\w\s]+|_+")
# Python runs each such operation to its end, and other threads wait.
_SLICE_CHARS = 2**14
# A few characters stand for whole sentences.
_LETTERS_OF_ONE = 4


def normalize_words(text: str) -> str:
    """Reduce a text to its words, case-folded and separated by single spaces, with a space at
    either end."""
    # One by one, because a search for all of them at once blocks the event loop from any thread.
    return f" {' '.join(found[0] for found in _WORD.finditer(fold_text(text)))} "


def fold_text(text: str) -> str:
    """Fold a text to one case and plain characters. One by one: marks behind a letter would be
    sorted, in time that grows with the square of their number."""
    if text.isascii():
        return text.casefold()
    plain = {ord(char): _plain_character(char) for char in set(text)}
    slices = (text[at : at + _SLICE_CHARS] for at in range(0, len(text), _SLICE_CHARS))
    return "".join(one.translate(plain).casefold() for one in slices)


def _plain_character(char: str) -> str:
    plain = unicodedata.normalize("NFKD", char)
    return plain if len(plain) <= _LETTERS_OF_ONE else char


def list_forms(text: str) -> list[str]:
    """Return the text folded, and reduced to ASCII in both ways: dropping only the accents, or the
    accented letters."""
    forms = (fold_text(text), _ascii(fold_text(text)), _ascii(text).casefold())
    return list(dict.fromkeys(forms))


def _ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode()


def strip_signs(text: str) -> str:
    """Return the words of a folded text without their signs."""
    words = [_SIGNS.sub("", word) for word in text.split()]
    return f" {' '.join(word for word in words if word)} "


def mark_results(text: str) -> str:
    """Return a folded text without the characters between its words, except for a colon after App
    and before a single 0 or 1."""
    return _GAPS.sub(_mark, f"\n{text}\n")


def _mark(gap: re.Match[str]) -> str:
    if gap[1]:
        return f":{gap[1]}:"
    return ":" if gap.string.endswith("app", 0, gap.start()) else ""


def squeeze_words(text: str) -> str:
    return "".join(found[0] for found in _WORD.finditer(fold_text(text)))


def normalize_spaces(text: str) -> str:
    return " ".join(text.casefold().split())
