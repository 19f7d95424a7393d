"""Layout of the screen. Pure; everything in pixels."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flotilla_environments.api import ToolSpec

WIDTH, HEIGHT = 1366, 768
LINE_CHARS, LINE_HEIGHT = 110, 20
_MARGIN, _TOP, _MENU_WIDTH, _FIELD_WIDTH = 16, 64, 300, 460
_MENU_PITCH, _FIELD_PITCH = 44, 52
_MAIN = _MENU_WIDTH + 2 * _MARGIN

Kind = Literal["title", "label", "button", "field"]
Target = tuple[Literal["tool", "field", "run"], str]


@dataclass(frozen=True)
class Box:
    left: int
    top: int
    width: int
    height: int

    def contains_point(self, x: int, y: int) -> bool:
        return self.left <= x < self.left + self.width and self.top <= y < self.top + self.height

    @property
    def middle(self) -> tuple[int, int]:
        return self.left + self.width // 2, self.top + self.height // 2


@dataclass(frozen=True)
class Element:
    """Something drawn; `target` is what a click on it means, `active` that it has the focus."""

    kind: Kind
    text: str
    box: Box
    target: Target | None = None
    active: bool = False


@dataclass
class Form:
    """A tool's form: what was typed, which field has the focus, and the last result."""

    tool: ToolSpec
    values: dict[str, str]
    focus: str | None = None
    selected: bool = False  # the next key replaces what the field holds
    result: str = ""
    scrolled: int = 0  # lines of the result above those shown


def lay_out_elements(title: str, tools: Sequence[ToolSpec], form: Form | None) -> list[Element]:
    """Lay out everything on the screen, from the back to the front."""
    shown = [Element("title", title, Box(0, 0, WIDTH, _TOP - _MARGIN))]
    pitch = min(_MENU_PITCH, (HEIGHT - _TOP) // max(1, len(tools)))
    for index, tool in enumerate(tools):
        box = Box(_MARGIN, _TOP + index * pitch, _MENU_WIDTH, pitch - pitch // 6)
        active = form is not None and form.tool.name == tool.name
        shown.append(Element("button", tool.name, box, ("tool", tool.name), active))
    return shown + (
        _form_elements(form) if form else [_text_label("Choose a tool on the left.", _TOP)]
    )


def _form_elements(form: Form) -> list[Element]:
    shown = [_text_label(form.tool.description.partition("\n")[0][:LINE_CHARS], _TOP)]
    names = list(form.tool.parameters["properties"])
    pitch = min(_FIELD_PITCH, (HEIGHT // 2) // max(1, len(names)))
    top = _TOP + 2 * LINE_HEIGHT
    for name in names:
        shown.append(Element("label", name, Box(_MAIN, top, 200, pitch - 8)))
        box = Box(_MAIN + 200, top, _FIELD_WIDTH, pitch - 8)
        target: Target = ("field", name)
        shown.append(Element("field", form.values[name], box, target, form.focus == name))
        top += pitch
    shown.append(Element("button", "Run", Box(_MAIN + 200, top, 120, 36), ("run", "")))
    top += 36 + _MARGIN
    for line in visible_lines(form.result, form.scrolled, (HEIGHT - top) // LINE_HEIGHT):
        shown.append(_text_label(line, top))
        top += LINE_HEIGHT
    return shown


def visible_lines(result: str, scrolled: int, room: int) -> list[str]:
    """Return the lines of a result that fit, from the one scrolled to."""
    lines = textwrap.wrap(result, LINE_CHARS)
    return lines[min(scrolled, max(0, len(lines) - 1)) :][:room]


def _text_label(text: str, top: int) -> Element:
    return Element("label", text, Box(_MAIN, top, WIDTH - _MAIN, LINE_HEIGHT))
