"""A page as Markdown (CommonMark, and GitHub's tables)."""

import re
from collections.abc import Sequence

from services.common.text.printable_text import make_visible
from services.reading.report.page import (
    Block,
    FinishedMarkdown,
    PageSection,
    PageTable,
    Picture,
    Verbatim,
)

# What would begin markup, wherever it is in a line.
_MARKUP = re.compile(r"[\\`*\[\]<>|]")
_HEADING = re.compile(r"^(?=#)", re.MULTILINE)


def render_markdown(title: str, sections: Sequence[PageSection]) -> str:
    """Render a page; no text of others is markup in it."""
    parts = [f"# {_escape(title)}"]
    for section in sections:
        parts += [f"## {_escape(section.title)}", *map(_render_block, section.blocks)]
    return "\n\n".join(parts) + "\n"


def _render_block(block: Block) -> str:
    match block:
        case PageTable(headings, rows):
            lines = [headings, ["---"] * len(headings), *rows]
            return "\n".join(_join_cells(line) for line in lines)
        case Verbatim(text):
            # Indented, not fenced: no line of the text can end it.
            return "\n".join(f"    {line}" for line in make_visible(text).split("\n"))
        case Picture(name, alt):
            return f"![{_escape(alt)}]({name})"
        case FinishedMarkdown(text):
            return _HEADING.sub("##", text.strip())
        case str():
            return _escape(block)


def _join_cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell if cell == '---' else _escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", make_visible(text.replace("\n", " "), lines=False))
