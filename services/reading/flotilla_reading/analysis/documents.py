"""An analysis, or a report, as Markdown, and as one HTML page that loads nothing; all texts are
escaped.

The inspector serves the page under its content policy, which allows `STYLE` by its digest."""

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from flotilla_common.text.printable_text import make_visible
from flotilla_reading.analysis.sections import Cell, Link, Section, make_sections

STYLE = """
:root { color-scheme: light dark; background: light-dark(#fff, #16171c); }
a { color: light-dark(#2a3fae, #a9b8ff); }
body { color: light-dark(#1c1c1c, #ececec); background: light-dark(#fff, #16171c); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; }
tr { border-bottom: 1px solid #8886; }
.scroll { overflow-x: auto; }
svg, img { max-width: 100%; height: auto; margin: 1rem 0; }
"""
# What a content policy names it by.
STYLE_DIGEST = "sha256-" + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
# What Markdown, or HTML within it, would interpret.
_MARKS = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def to_markdown(analysis: dict[str, Any]) -> str:
    """Return the analysis as Markdown."""
    return render_markdown(_title(analysis), make_sections(analysis), analysis["written_by"])


def to_html(analysis: dict[str, Any]) -> str:
    """Return the analysis as a page."""
    return render_html(_title(analysis), make_sections(analysis), analysis["written_by"])


def render_markdown(title: str, sections: Sequence[Section], written_by: str) -> str:
    """Return sections as Markdown."""
    parts = [f"# {_mark(title)}", _mark(written_by)]
    for section in sections:
        image = f"![{_mark(section.title)}]({section.picture_file})" if section.picture_file else ""
        listing = "\n".join(f"    {line}" for line in make_visible(section.listing).split("\n"))
        parts += [f"## {_mark(section.title)}", _mark(section.text), image]
        # Indented, not fenced: no line of a listing can end it.
        parts += [_markdown_table(section), listing if section.listing else ""]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_html(title: str, sections: Sequence[Section], written_by: str) -> str:
    """Return sections as a page."""
    title = _escape(title)
    body = "\n".join(map(_html_section, sections))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body><main>\n<h1>{title}</h1>\n{body}\n"
        f"<p><small>{_escape(written_by)}</small></p>\n</main></body>\n</html>\n"
    )


def _title(analysis: dict[str, Any]) -> str:
    return f"Analysis of {analysis['run_id']}, version {analysis['step']}"


def _markdown_table(section: Section) -> str:
    if not section.rows:
        return ""
    lines = [[_mark(each) for each in section.headings], ("---",) * len(section.headings)]
    head = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join(head + [f"| {' | '.join(map(_markdown_cell, row))} |" for row in section.rows])


def _markdown_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return _mark(cell)
    return ", ".join(f"[{_mark(link.text)}]({link.href})" for link in cell)


def _mark(text: str) -> str:
    return _MARKS.sub(r"\\\1", make_visible(text, lines=False))


def _html_section(section: Section) -> str:
    parts = [f"<h2>{_escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{_escape(section.text)}</p>")
    parts.append(section.picture)
    name = _escape(section.title)
    region = f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">'
    if section.rows:
        head = "".join(f'<th scope="col">{_escape(each)}</th>' for each in section.headings)
        rows = "\n".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in section.rows)
        parts.append(
            f"{region}<table>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
        )
    if section.listing:
        parts.append(f"{region}<pre>{escape(make_visible(section.listing))}</pre></div>")
    return "\n".join(part for part in parts if part)


def _html_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{_escape(cell)}</td>"
    return f"<td>{_html_links(cell)}</td>"


def _html_links(links: Sequence[Link]) -> str:
    return ", ".join(f'<a href="{escape(each.href)}">{_escape(each.text)}</a>' for each in links)


def _escape(text: str) -> str:
    return escape(make_visible(text, lines=False))
