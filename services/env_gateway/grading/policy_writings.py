"""What a policy wrote in one episode, and what of it a verifier may read. Pure.

A verifier prints what it likes: the answer, or a row that was named by a tool call. Whoever reads
results from there has to know which words may be the policy's own.
"""

import base64
import binascii
import html
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

# Of the texts of an episode. Beyond it all that is printed may be the policy's.
_KEPT_CHARS = 2**19
_LINES_KEPT = 1000
_PLACE_CHARS = 200
# As many as four encodings have in any order. A text with more is not read to its end.
_READINGS = 16
_TAG = re.compile(r"<[^<>]*>")
_REFERENCE = re.compile(r"&#0*([0-9]+)")
# More than any character's number has; Python refuses to read thousands.
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
# Of a conversation, those who are not the policy.
_OTHERS = ("system", "developer", "user", "tool", "function")


# Behind a place: the names of its fields, which a tool's schema gives and not a policy's wish.
KEYS = " (keys)"


class Phrase(StrEnum):
    """Words by which results are found in what is printed, as letters alone."""

    JUDGE_ERROR = "judgeerror"
    FAILED = "erroraccumulator"
    PASSED = "successaccumulator"


def _pattern(first: str, second: str) -> re.Pattern[str]:
    between = r"(?:\\u[0-9a-f]{4}|\\[nrt]|[\W_])*"
    return re.compile(first + between + second, re.IGNORECASE)


_SHOWN = {
    Phrase.JUDGE_ERROR: _pattern("judge", "error"),
    Phrase.FAILED: _pattern("error", "accumulator"),
    Phrase.PASSED: _pattern("success", "accumulator"),
}


@dataclass(slots=True)
class Writings:
    """`written` are texts of the policy's, by place; of what it was shown, only what looks like a
    verifier's results is kept."""

    written: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    chars: int = 0
    shown_phrases: set[Phrase] = field(default_factory=set[Phrase])
    shown_lines: set[str] = field(default_factory=set[str])

    @property
    def too_many(self) -> bool:
        return self.chars > _KEPT_CHARS or len(self.shown_lines) > _LINES_KEPT

    def copy(self) -> "Writings":
        written = {where: list(texts) for where, texts in self.written.items()}
        return Writings(written, self.chars, set(self.shown_phrases), set(self.shown_lines))

    def wrote(self, where: str, text: str) -> None:
        self.chars += len(text)
        if self.chars <= _KEPT_CHARS:
            self.written.setdefault(where, []).append(text)

    def called(self, tool: str, arguments: Mapping[str, Any]) -> None:
        """Every text among the arguments of a call, keys included."""
        for where, text in _texts(arguments, tool):
            self.wrote(where, text)

    def showed(self, text: str) -> None:
        for phrase, pattern in _SHOWN.items():
            if phrase not in self.shown_phrases and pattern.search(text):
                self.shown_phrases.add(phrase)
        for start, end in app_spans(text, _APP, _VALUE):
            if self.too_many:
                return
            line = _LINE_START.split(text[start:end])[-1]
            if app := _APP.search(line):
                self.shown_lines.add(line[app.start() :])

    def told(self, message: object) -> None:
        """A message of the conversation: the policy wrote what nobody else did."""
        fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        for where, text in _texts(message, "conversation"):
            if fields.get("role") in _OTHERS:
                self.showed(text)
            else:
                self.wrote(where, text)


def _texts(value: object, where: str) -> Iterator[tuple[str, str]]:
    """(where, text) of each text in a JSON value; not recursive, as it may be nested deeply."""
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


def readings(text: str) -> tuple[list[str], bool]:
    """The text, and what a verifier that decodes it reads; also what was encoded twice. And whether
    these are all that there are."""
    found = [text]
    for one in found:
        for decode in (_unescaped, _without_markup, _octets, _base64, _without_terminal):
            decoded = decode(one)
            if decoded and decoded not in found:
                if len(found) == _READINGS:
                    return found, False
                found.append(decoded)
    return found, True


def app_spans(text: str, app: re.Pattern[str], value: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Where each app's result begins and ends. In one pass: one pattern for the whole would look
    for a value behind each beginning."""
    at = 0
    while (start := app.search(text, at)) and (end := value.search(text, start.end())):
        at = end.start() - _NAME_CHARS
        if start.end() >= at:
            yield start.start(), end.end()
            at = end.end()


def _unescaped(text: str) -> str:
    """With the escapes of JSON and Python resolved."""
    return _ESCAPE.sub(_character, text) if "\\" in text else text


def _character(escape: re.Match[str]) -> str:
    code = escape[1]
    if code in _CONTROLS:
        return _CONTROLS[code]
    return chr(int(code[1:], 16) if code[0] in "ux" else int(code, 8))


def _without_markup(text: str) -> str:
    """Without the tags and references of HTML and the links of Markdown."""
    if "](" in text:
        text = _LINK.sub(r"\1", text)
    if "<" in text or "&" in text:
        return html.unescape(_REFERENCE.sub(_reference, _TAG.sub("", text)))
    return text


def _reference(found: re.Match[str]) -> str:
    return f"&#{found[1]}" if len(found[1]) <= _REFERENCE_DIGITS else "\ufffd"


def _without_terminal(text: str) -> str:
    """Without what makes a terminal change colors and titles."""
    return _TERMINAL.sub("", text) if "\x1b" in text or "\x9b" in text or "\x9d" in text else text


def _octets(text: str) -> str:
    """With the octets of URLs and of mail (quoted-printable) resolved."""
    resolve: Callable[[re.Match[str]], str] = lambda found: bytes.fromhex(  # noqa: E731
        found[0].replace("%", "").replace("=", "")
    ).decode("utf-8", "replace")
    return _OCTETS.sub(resolve, text) if "%" in text or "=" in text else text


def _base64(text: str) -> str:
    """All that is base64 of a text, such as the lines of a mail."""
    return "".join(filter(None, map(_decoded, _BASE64.findall(text))))


def _decoded(word: str) -> str:
    plain = word.rstrip("=").translate(_URL_SAFE)
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4)).decode()
    except (binascii.Error, ValueError):
        return ""
