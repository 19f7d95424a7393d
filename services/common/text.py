"""Text of others, made fit for a line of a log, a table or a terminal."""

import re

# A terminal's own commands: CSI, and OSC up to its end, which may be missing.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.")


def one_line(text: str, characters: int) -> str:
    """All of `text` on one line of printable characters, cut to so many."""
    clean = "".join(c if c.isprintable() else " " for c in _ESCAPES.sub("", text))
    line = " ".join(clean.split())
    return line if len(line) <= characters else f"{line[: characters - 3]}..."


def first_line(text: str, characters: int) -> str:
    """The first line of `text` that says anything, printable, cut to so many characters."""
    return next((line for each in text.splitlines() if (line := one_line(each, characters))), "")
