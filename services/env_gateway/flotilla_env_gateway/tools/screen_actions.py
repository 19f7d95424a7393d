"""What a policy can do at a screen, in no vocabulary's words, and the units of its points. Pure."""

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Literal, TypeGuard

from flotilla_common.tasks.task_format import TaskError

Kind = Literal[
    "screenshot",
    "cursor_position",
    "move",
    "click",
    "press",
    "release",
    "drag",
    "scroll",
    "type",
    "keys",
    "key_down",
    "key_up",
    "hold_keys",
    "wait",
    "done",
]
# Fractions of the screen's width and height.
Point = tuple[Fraction, Fraction]
LOOKS = ("screenshot", "cursor_position")
_SHOWN = 10**15


@dataclass(frozen=True, slots=True)
class ScreenAction:
    """One action. `keys` are pressed together, and `held` stay down during a click; `scroll` counts
    notches of a wheel to the right and down; a drag goes from `start` to `point`; with `enter` the
    Enter key follows the text."""

    kind: Kind
    point: Point | None = None
    start: Point | None = None
    button: str = "left"
    clicks: int = 1
    text: str = ""
    keys: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    scroll: tuple[int, int] = (0, 0)
    seconds: float | None = None
    enter: bool = False

    def changed_fields(self) -> set[str]:
        """Return the names of the fields that say more than the kind does."""
        named = (field for field in fields(self) if field.name != "kind")
        return {field.name for field in named if getattr(self, field.name) != field.default}


@dataclass(frozen=True, slots=True)
class Units:
    """Range of coordinates: whole numbers below `width` and `height`, or with `is_normalized`
    numbers from 0 to 1."""

    width: int
    height: int
    is_normalized: bool = False

    @property
    def rule(self) -> str:
        if self.is_normalized:
            return "x and y must be from 0 to 1"
        return f"x must be 0 to {self.width - 1} and y 0 to {self.height - 1}"

    def find_point(self, name: str, x: object, y: object) -> Point:
        """Return the point at coordinates that a policy named. Raises TaskError."""
        if not (_is_number(x) and _is_number(y)):
            raise TaskError(f"{name} must be [x, y], two numbers")
        found = (Fraction(x) / self.width, Fraction(y) / self.height)
        if not all(0 <= part < 1 or (part == 1 and self.is_normalized) for part in found):
            raise TaskError(f"{name} [{_show(x)}, {_show(y)}] is not on the screen: {self.rule}")
        return found

    def place_point(self, point: Point) -> tuple[float, float]:
        """Return a point's coordinates: those of the pixel that holds it."""
        if self.is_normalized:
            return round(float(point[0]), 4), round(float(point[1]), 4)
        x, y = int(point[0] * self.width), int(point[1] * self.height)
        return min(x, self.width - 1), min(y, self.height - 1)


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: float) -> str:
    return f"{value:g}" if abs(value) < _SHOWN else "a huge number"
