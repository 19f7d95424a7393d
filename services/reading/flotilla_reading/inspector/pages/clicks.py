"""Where a policy's calls point on the screen that it saw. Pure.

The description of the tool, as the policy read it, tells the units of the points: a range, numbers
from 0 to 1, or the size of the screen. Without any, they are thousandths of the screen for tools of
Fleet's CUA server, and pixels of the picture for others."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flotilla_common.episodes.episode_text import EpisodeCall

_RANGE = re.compile(r"\bx from 0 to (\d{1,6}) and y from 0 to (\d{1,6})\b")
_NORMALIZED = re.compile(r"\bfrom 0 to 1\b")
_SIZE = re.compile(r"\b([1-9]\d{2,4})\s?[x×]\s?([1-9]\d{2,4})\b")  # noqa: RUF001
# Tools that point at a screen, whatever their description says.
_SCREEN_TOOLS = ("computer",)
_THOUSANDTHS_TOOLS = ("mouse_click", "mouse_move", "mouse_drag")
_LISTS = ("start_coordinate", "coordinate", "path")
_PAIRS = (("x_start", "y_start"), ("x_end", "y_end"), ("x", "y"))
_VERBS = ("action", "type")
_MOST_POINTS = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """What one call did on a picture: `points` are in the picture's pixels, in order."""

    label: str
    points: tuple[tuple[float, float], ...]

    @property
    def line(self) -> str:
        """The points as SVG writes a line."""
        return " ".join(f"{x:g},{y:g}" for x, y in self.points)


def mark_call(call: EpisodeCall, description: str, turn: int, size: tuple[int, int]) -> Mark | None:
    """Return the mark of a call on a picture of such a size; None if it does not point at it."""
    units = _find_units(call.name, description)
    if isinstance(call.arguments, str) or not (units or call.name in _SCREEN_TOOLS):
        return None
    scale = [shown / own for shown, own in zip(size, units or size, strict=True)]
    points = [(x * scale[0], y * scale[1]) for x, y in _find_points(call.arguments)][:_MOST_POINTS]
    if not points:
        return None
    verb = next((v for v in map(call.arguments.get, _VERBS) if isinstance(v, str)), call.name)
    return Mark(f"turn {turn}, {verb[:40]}", tuple(points))


def _find_units(name: str, description: str) -> tuple[int, int] | None:
    """Return the range of x and y, exclusive; None if neither the tool's name nor its description
    tells it."""
    if found := _RANGE.search(description):
        return int(found[1]) + 1, int(found[2]) + 1
    if _NORMALIZED.search(description):
        return 1, 1
    if name in _THOUSANDTHS_TOOLS:
        return 1000, 1000
    found = _SIZE.search(description)
    return (int(found[1]), int(found[2])) if found else None


def _find_points(arguments: dict[str, Any]) -> Iterator[tuple[float, float]]:
    for name in _LISTS:
        value = arguments.get(name)
        for each in value if name == "path" and isinstance(value, list) else [value]:
            yield from _read_point(*_split(each))
    for across, down in _PAIRS:
        yield from _read_point(arguments.get(across), arguments.get(down))


def _split(value: Any) -> tuple[object, object]:
    if isinstance(value, dict):
        return value.get("x"), value.get("y")
    return tuple(value) if isinstance(value, list) and len(value) == 2 else (None, None)


def _read_point(x: object, y: object) -> Iterator[tuple[float, float]]:
    if isinstance(x, int | float) and isinstance(y, int | float) and abs(x) < 1e6 > abs(y):
        yield x, y
