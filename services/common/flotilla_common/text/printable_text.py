"""Untrusted text, made safe for a line of a log, a table or a terminal.

All output of a process goes through here or through a console that uses it: a prompt, a tool's
description or an error can contain terminal commands, such as a new title or a write to the
clipboard, or characters that show text in another order.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TextIO

# A terminal's own commands: CSI, and OSC up to its end, which may be missing.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.")
# Marks and overrides of the direction of text.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Line ends to readers that split a log by Unicode's rules.
_LINE_ENDS = (0x2028, 0x2029)
# Invisible characters, which can hide whole sentences: zero width, tags and the variation selectors
# that no script needs. Joiners and the selectors of emoji are part of text.
_UNSEEN = (
    *(0x00AD, 0x034F, 0x115F, 0x1160, 0x180E, 0x200B, 0x3164, 0xFEFF, 0xFFA0),
    *range(0x2060, 0x2066),
    *range(0x206A, 0x2070),
    *range(0xFFF9, 0xFFFC),
    *range(0xE0000, 0xE1000),
)
_SURROGATES = range(0xD800, 0xE000)
_LAYOUT = ("\n", "\t")
# One character for one: C0 and DEL as their pictures, all others as a replacement character.
_SHOWN: Mapping[int, int] = {
    **{code: 0x2400 + code for code in range(0x20)},
    0x7F: 0x2421,
    **dict.fromkeys(
        (*range(0x80, 0xA0), *_DIRECTIONS, *_LINE_ENDS, *_UNSEEN, *_SURROGATES), 0xFFFD
    ),
}
_SHOWN_IN_LINES = {code: to for code, to in _SHOWN.items() if chr(code) not in _LAYOUT}
# Those that JSON does not escape.
_ACTING = re.compile("[" + re.escape("".join(chr(code) for code in _SHOWN if code >= 0x7F)) + "]")


def make_visible(text: str, *, lines: bool = True) -> str:
    """Replace each character that a terminal would interpret with a visible one.

    With `lines`, newlines and tabs stay."""
    # Not `isprintable` alone: variation selectors are.
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_SHOWN_IN_LINES if lines else _SHOWN)


def json_line(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Return `value` as JSON on one line, with every character that a terminal would interpret
    escaped."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    if text.isascii() and text.isprintable():
        return text
    return _ACTING.sub(lambda match: json.dumps(match[0])[1:-1], text)


def print_visible(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print untrusted text to standard output or `file`."""
    print(make_visible(text), end=end, file=file, flush=True)


def print_json(value: Any) -> None:
    """Print a value for programs, on one line."""
    print(json_line(value), flush=True)


def one_line(text: str, characters: int) -> str:
    """Return all of `text` on one line of printable characters, cut to so many."""
    clean = "".join(c if c.isprintable() else " " for c in _ESCAPES.sub("", text))
    line = " ".join(clean.split())
    return line if len(line) <= characters else f"{line[: characters - 3]}..."


def first_line(text: str, characters: int) -> str:
    """Return the first non-empty line of `text`, printable and cut to so many characters."""
    return next((line for each in text.splitlines() if (line := one_line(each, characters))), "")
