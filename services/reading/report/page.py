"""The parts of a page, without their looks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of texts; each row begins with its name."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text that is shown as it is: commands, or a spec."""

    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG file next to the page, and what it shows."""

    name: str
    alt: str


@dataclass(frozen=True, slots=True)
class FinishedMarkdown:
    """Markdown that another program of ours has written, and escaped."""

    text: str


# A text alone is a paragraph.
Block = str | PageTable | Verbatim | Picture | FinishedMarkdown


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of the page under a heading."""

    title: str
    blocks: Sequence[Block]
