"""Hostile text, made visible: invisible control characters are shown as codes like `U+202E`."""

from flotilla_common.text.printable_text import make_visible

# Most characters of a message that a page shows before it links to the rest.
MOST_CHARACTERS = 20_000


def split_visible(text: str) -> list[tuple[str, bool]]:
    """Split a text into pieces (text, acting); an acting piece is the code of a control character,
    such as U+202E, or U+001B, which starts terminal commands."""
    if text.isascii() and text.isprintable():
        return [(text, False)] if text else []
    pieces: list[tuple[str, bool]] = []
    plain: list[str] = []
    for character in text.replace("\r\n", "\n"):
        if make_visible(character) == character:
            plain.append(character)
            continue
        if plain:
            pieces.append(("".join(plain), False))
            plain = []
        pieces.append((f"U+{ord(character):04X}", True))
    return [*pieces, ("".join(plain), False)] if plain else pieces


def visible(text: str) -> str:
    """Return a text with each control character as its code in angle brackets."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(f"⟨{piece}⟩" if acting else piece for piece, acting in split_visible(text))


def cut(text: str, most: int = MOST_CHARACTERS) -> tuple[str, int]:
    """Return the start of a text, and the number of characters left out."""
    return (text, 0) if len(text) <= most else (text[:most], len(text) - most)
