"""Commands of a page's console blocks, with what the page says they print."""

import re


def read_examples(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands of the blocks without a language, each with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for block in (text for language, text in blocks if not language):
        text = block.replace("\n> {", "\n{").replace("\n> END", "\nEND")
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            here = re.match(r"(?s).*?\nEND\n", part) if "<<" in part else None
            command, _, printed = part.partition("\n")
            found.append((here[0], []) if here else (command, printed.splitlines()))
    return found
