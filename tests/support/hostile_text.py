"""Texts of strangers that are to be shown: commands to a terminal, markup, and text that turns
around."""

import re

# A title, the clipboard (OSC 52), a link, C1, DEL, bidirectional controls, markup, an emoji code.
HOSTILE = (
    "\x1b]0;owned\x07 \x1b]52;c;ZXZpbA==\x1b\\ \x1b]8;;http://evil\x1b\\link \x1b[2J"
    " \x9b2J\x9d0;t\x9c \x7f\x08\x0b\x00 \u202eevil\u202c \u2066x\u2069 \u200e\u200f\u061c"
    " [red]r[/red] [link=http://evil]l[/link] :smile: over\rwritten"
)
# Half of a character, which JSON can hold and protobuf cannot.
SURROGATES = f"\ud800{HOSTILE}\udfff"
# Sequences that rich itself writes: styles, and a cursor moved, hidden and shown.
_OWN = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|[0-9]*[AKG])")
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_HALVES = re.compile("[\ud800-\udfff]")


def assert_harmless(printed: str, *, styled: bool = False) -> None:
    """Check that nothing in it acts on a terminal, and that the hostile text is readable."""
    # A live display goes back to the start of its line; of text, rich leaves such out itself.
    shown = _OWN.sub("", printed).replace("\r", "") if styled else printed
    found = _ACTING.search(shown) or _HALVES.search(shown)
    assert found is None, ascii(shown[max(0, found.start() - 40) : found.end() + 40])
    assert "0;owned" in shown and "[red]r[/red]" in shown and ":smile:" in shown, shown
