"""Terminal output of the `flotilla` commands."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flotilla_common.text.printable_text import make_visible

_WIDEST = 10_000


class CommandError(Exception):
    """A command cannot do its work; the message states the cause."""


class Terminal(Console):
    """Console that prints all text as plain text. It interprets no markup and forwards no control
    sequence: styles come from the printed objects, never from their text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        # Replace before rich measures the text, so that a table's columns fit.
        return super().render_str(make_visible(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(make_visible(segment.text), segment.style)


def make_table(headings: Iterable[str], *, no_wrap: bool = False) -> Table:
    """Return a table of these columns, without lines."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=no_wrap)
    return table


def print_table(table: Table, console: Terminal) -> None:
    """Print a table at its full width, for programs to read and ids to be copied whole. On a
    narrower terminal, print each row as lines of a heading and its cell."""
    widest = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    if not console.is_terminal or widest <= console.width:
        table.width = widest
        console.print(table, crop=False, soft_wrap=True)
        return
    names = [str(column.header) for column in table.columns]
    room = max(map(len, names), default=0)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        for name, cell in zip(names, cells, strict=True):
            console.print(f"{name:<{room}}  {cell}", soft_wrap=True)
        console.print()
