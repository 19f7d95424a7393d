"""The terminal, as the commands of `flotilla` write to it."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from services.common.text import visible


class Terminal(Console):
    """Shows whatever it is given as text. Markup in it is none, and nothing of it is a command to
    the terminal: styles come from the objects that are printed, and never from what they say."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        # Before it is measured, so that a table's columns fit.
        return super().render_str(visible(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
