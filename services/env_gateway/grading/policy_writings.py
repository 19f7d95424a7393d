"""Everything a policy wrote in one episode, in each form in which a verifier may read it.
Pure.

A verifier's output may contain the answer, or a row that a tool call named. Reading results
from it requires knowing which words may be the policy's own."""

import base64
import html
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from services.common.parsing import as_object

# Limit of an episode's texts. Beyond it, all printed text may be the policy's.
_KEPT_CHARS = 2**19
_LINES_KEPT = 1000
_PLACE_CHARS = 200
# As many as four encodings have in any order. A text with more is not decoded fully.
_READINGS = 16
_TAG = re.compile(r"<[^<>]*>")
_REFERENCE = re.compile(r"&#0*([0-9]+)")
# More digits than any character's number has; Python refuses to read thousands.
_REFERENCE_DIGITS = 7
_LINK = re.compile(r"!?\[([^\[\]\n]*)\]\([^()\n]*\)")
# Colors and titles, with the codes of 7 and of 8 bits.
_TERMINAL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[@-Z\\-_]"
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[0-7]{1,3}|[nrtbfv])")
_OCTETS = re.compile(r"(?:[%=][0-9a-fA-F]{2})+")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")
_URL_SAFE = str.maketrans("-_", "+/")
_CONTROLS = dict(zip("nrtbfv", "\n\r\t\b\f\v", strict=True))
_APP = re.compile(r"app ", re.IGNORECASE)
_VALUE = re.compile(r": [01]\b")
_NAME_CHARS = 500
_LINE_START = re.compile(r"[\n\\]")
# Roles in a conversation other than the policy's.
_OTHERS = ("system", "developer", "user", "tool", "function")


# Suffix of a place for the names of its fields, which a tool's schema sets, not the policy.
KEYS = " (keys)"


class Phrase(StrEnum):
    """Markers of results in a verifier's output, reduced to letters."""

    JUDGE_ERROR = "judgeerror"
    FAILED = "erroraccumulator"
    PASSED = "successaccumulator"


def _phrase_pattern(first: str, second: str) -> re.Pattern[str]:
    between = r"(?:\\u[0-9a-f]{4}|\\[nrt]|[\W_])*"
    return re.compile(first + between + second, re.IGNORECASE)


_SHOWN = {
    Phrase.JUDGE_ERROR: _phrase_pattern("judge", "error"),
    Phrase.FAILED: _phrase_pattern("error", "accumulator"),
    Phrase.PASSED: _phrase_pattern("success", "accumulator"),
}


@dataclass(slots=True)
class PolicyWritings:
    """Texts from one episode. `written` holds the policy's texts by place. Of the text shown
    to the policy, only parts that resemble a verifier's results are kept."""

    written: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    chars: int = 0
    shown_phrases: set[Phrase] = field(default_factory=set[Phrase])
    shown_lines: set[str] = field(default_factory=set[str])

    @property
    def too_many(self) -> bool:
        return self.chars > _KEPT_CHARS or len(self.shown_lines) > _LINES_KEPT

    def copy(self) -> "PolicyWritings":
        written = {where: list(texts) for where, texts in self.written.items()}
        return PolicyWritings(written, self.chars, set(self.shown_phrases), set(self.shown_lines))

    def add_written(self, where: str, text: str) -> None:
        self.chars += len(text)
        if self.chars <= _KEPT_CHARS:
            self.written.setdefault(where, []).append(text)

    def add_call(self, tool: str, arguments: Mapping[str, Any]) -> None:
        """Add every text among a call's arguments, keys included."""
        for where, text in _iterate_texts(arguments, tool):
            self.add_written(where, text)

    def add_shown(self, text: str) -> None:
        for phrase, pattern in _SHOWN.items():
            if phrase not in self.shown_phrases and pattern.search(text):
                self.shown_phrases.add(phrase)
        for start, end in app_spans(text, _APP, _VALUE):
            if self.too_many:
                return
            line = _LINE_START.split(text[start:end])[-1]
            if app := _APP.search(line):
                self.shown_lines.add(line[app.start() :])

    def add_message(self, message: object) -> None:
        """Add a message of the conversation. Messages of the assistant, or without a role, are
        the policy's; the others were shown to it."""
        fields = as_object(message)
        for where, text in _iterate_texts(message, "conversation"):
            if fields.get("role") in _OTHERS:
                self.add_shown(text)
            else:
                self.add_written(where, text)


def _iterate_texts(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield (where, text) for each text in a JSON value. It is not recursive, because the
    value may be deeply nested."""
    left: list[tuple[str, object]] = [(where, value)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            yield where, value
        elif isinstance(value, list):
            left.extend((where, item) for item in reversed(cast("list[object]", value)))
        elif isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            yield from ((f"{where}{KEYS}", key) for key in fields)
            left.extend(
                (f"{where}.{key}"[:_PLACE_CHARS], item) for key, item in reversed(fields.items())
            )


def decode_readings(text: str) -> tuple[list[str], bool]:
    """Return the text and every decoding that a verifier may read from it, including double
    encodings."""
    found = [text]
    for one in found:
        for decode in (
            _resolve_escapes,
            _strip_markup,
            _resolve_octets,
            _decode_base64,
            _without_terminal,
        ):
            decoded = decode(one)
            if decoded and decoded not in found:
                if len(found) == _READINGS:
                    return found, False
                found.append(decoded)
    return found, True


def app_spans(text: str, app: re.Pattern[str], value: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each app's result. It takes one pass: a pattern for the whole
    would search for a value after each start."""
    at = 0
    while (start := app.search(text, at)) and (end := value.search(text, start.end())):
        at = end.start() - _NAME_CHARS
        if start.end() >= at:
            yield start.start(), end.end()
            at = end.end()


def _resolve_escapes(text: str) -> str:
    """Resolve the escapes of JSON and Python."""
    return _ESCAPE.sub(_escape_to_character, text) if "\\" in text else text


def _escape_to_character(escape: re.Match[str]) -> str:
    code = escape[1]
    if code in _CONTROLS:
        return _CONTROLS[code]
    return chr(int(code[1:], 16) if code[0] in "ux" else int(code, 8))


def _strip_markup(text: str) -> str:
    """Remove the tags and references of HTML and the links of Markdown."""
    if "](" in text:
        text = _LINK.sub(r"\1", text)
    if "<" in text or "&" in text:
        return html.unescape(_REFERENCE.sub(_reference, _TAG.sub("", text)))
    return text


def _reference(found: re.Match[str]) -> str:
    return f"&#{found[1]}" if len(found[1]) <= _REFERENCE_DIGITS else "\ufffd"


def _without_terminal(text: str) -> str:
    """Remove a terminal's codes for colors and titles."""
    return _TERMINAL.sub("", text) if "\x1b" in text or "\x9b" in text or "\x9d" in text else text


def _resolve_octets(text: str) -> str:
    """Resolve the octets of URLs and of mail (quoted-printable)."""
    resolve: Callable[[re.Match[str]], str] = lambda found: bytes.fromhex(  # noqa: E731
        found[0].replace("%", "").replace("=", "")
    ).decode("utf-8", "replace")
    return _OCTETS.sub(resolve, text) if "%" in text or "=" in text else text


def _decode_base64(text: str) -> str:
    """Decode and join all base64 in a text, such as the lines of a mail."""
    return "".join(filter(None, map(_decode_word, _BASE64.findall(text))))


def _decode_word(word: str) -> str:
    plain = word.rstrip("=").translate(_URL_SAFE)
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4)).decode()
    except ValueError:
        return ""
