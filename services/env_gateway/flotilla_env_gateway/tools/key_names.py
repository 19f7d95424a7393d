"""Names of keys: X's, as xdotool types them, a browser's, and OpenAI's. Pure."""

from collections.abc import Mapping
from typing import Literal

KeyNames = Literal["x", "browser", "openai"]
_COLUMNS = ("x", "browser", "openai")
# One key a line; the first column is also its name between vocabularies.
_TABLE = (
    ("Return", "Enter", "ENTER"),
    ("ctrl", "Control", "CTRL"),
    ("alt", "Alt", "ALT"),
    ("shift", "Shift", "SHIFT"),
    ("super", "Meta", "META"),
    ("Tab", "Tab", "TAB"),
    ("Escape", "Escape", "ESC"),
    ("BackSpace", "Backspace", "BACKSPACE"),
    ("Delete", "Delete", "DELETE"),
    ("Insert", "Insert", "INSERT"),
    ("space", "Space", "SPACE"),
    ("Up", "ArrowUp", "UP"),
    ("Down", "ArrowDown", "DOWN"),
    ("Left", "ArrowLeft", "LEFT"),
    ("Right", "ArrowRight", "RIGHT"),
    ("Page_Up", "PageUp", "PAGEUP"),
    ("Page_Down", "PageDown", "PAGEDOWN"),
    ("Home", "Home", "HOME"),
    ("End", "End", "END"),
    ("plus", "+", "+"),
    ("minus", "-", "-"),
)
# Names that policies also use, in lower case.
_ALIASES = {
    "cmd": "super",
    "command": "super",
    "win": "super",
    "option": "alt",
    "del": "Delete",
    " ": "space",
}
_KNOWN: Mapping[str, str] = {
    **_ALIASES,
    **{name.lower(): row[0] for row in _TABLE for name in row},
}
_ROWS = {row[0]: row for row in _TABLE}


def read_key(name: str) -> str:
    """Return a key's name between vocabularies, whatever vocabulary it is from; a name that none
    of them has stays as it is."""
    if name.lower() in _KNOWN:
        return _KNOWN[name.lower()]
    return name.lower() if len(name) == 1 else name


def write_key(key: str, names: KeyNames) -> str:
    """Return the name of a key in a vocabulary."""
    row = _ROWS.get(key)
    if row is None:
        return key.upper() if names == "openai" else key
    return row[_COLUMNS.index(names)]
