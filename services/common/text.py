"""Text of others, made fit for a line of a log, a table or a terminal.

Whatever a process prints goes through here or through a console that does: a prompt, a tool's
description or an error can hold what a terminal obeys, such as a new title or a write to the
clipboard, or what shows text in another order than it has.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TextIO

# A terminal's own commands: CSI, and OSC up to its end, which may be missing.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.")
# Marks and overrides of the direction of text.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)
_LAYOUT = ("\n", "\t")
# One character for one: C0 and DEL as their pictures, all others as a replacement character.
_SHOWN: Mapping[int, int] = {
    **{code: 0x2400 + code for code in range(0x20)},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *_DIRECTIONS, *_SURROGATES), 0xFFFD),
}
_SHOWN_IN_LINES = {code: to for code, to in _SHOWN.items() if chr(code) not in _LAYOUT}
_ACTING = re.compile(
    "[\x7f-\x9f" + "".join(map(chr, _DIRECTIONS)) + f"{chr(0xD800)}-{chr(0xDFFF)}]"
)


def visible(text: str, *, lines: bool = True) -> str:
    """`text` with a visible character in the place of each that a terminal would act on. With
    `lines`, new lines and tabs stay."""
    return text if text.isprintable() else text.translate(_SHOWN_IN_LINES if lines else _SHOWN)


def json_line(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """`value` as JSON on one line, in which whatever a terminal would act on is escaped."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    if text.isprintable():
        return text
    return _ACTING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a text, whoever wrote it, to standard output or `file`."""
    print(visible(text), end=end, file=file, flush=True)


def say_json(value: Any) -> None:
    """Print a value for programs, on one line."""
    print(json_line(value), flush=True)


def one_line(text: str, characters: int) -> str:
    """All of `text` on one line of printable characters, cut to so many."""
    clean = "".join(c if c.isprintable() else " " for c in _ESCAPES.sub("", text))
    line = " ".join(clean.split())
    return line if len(line) <= characters else f"{line[: characters - 3]}..."


def first_line(text: str, characters: int) -> str:
    """The first line of `text` that says anything, printable, cut to so many characters."""
    return next((line for each in text.splitlines() if (line := one_line(each, characters))), "")
