"""Arguments of screen actions in the forms that vocabularies have for them: each reads what a
policy wrote into a field of `ScreenAction`, and writes a field for an environment. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from flotilla_common.tasks.task_format import TaskError
from flotilla_env_gateway.tools.key_names import KeyNames, read_key, write_key
from flotilla_env_gateway.tools.screen_actions import ScreenAction, Units

# A wheel's notch scrolls a browser by about so much.
_NOTCH_PIXELS = 100
_MOST_NOTCHES, _MOST_SECONDS, _MOST_CLICKS, _MOST_KEYS = 1000, 300, 3, 16
_DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Argument(ABC):
    """One or several properties of a call that say one thing. `fields` of the action hold it."""

    names: tuple[str, ...]
    fields: tuple[str, ...]
    required: bool = False

    @abstractmethod
    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        """Return the action's fields; at least one of the properties is there. Raises TaskError."""

    @abstractmethod
    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        """Return the properties."""

    @abstractmethod
    def describe(self, units: Units) -> dict[str, Any]:
        """Return the properties' schemas."""

    def fits(self, action: ScreenAction) -> bool:
        """Return False for what the properties cannot say."""
        return True

    def is_given(self, arguments: Arguments) -> bool:
        return any(arguments.get(name) is not None for name in self.names)

    def _take(self, arguments: Arguments, kind: type, what: str) -> Any:
        value = arguments[self.names[0]]
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise TaskError(f"{self.names[0]} must be {what}")
        return value


class PointArgument(Argument):
    """A point as `[x, y]` of one property, or as x and y of two."""

    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        if len(self.names) == 2:
            x, y = (arguments.get(name) for name in self.names)
            return {self.fields[0]: units.find_point(" and ".join(self.names), x, y)}
        pair = arguments[self.names[0]]
        x, y = cast("list[object]", pair) if _is_list(pair, 2) else (None, None)
        return {self.fields[0]: units.find_point(self.names[0], x, y)}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        place = units.place_point(getattr(action, self.fields[0]))
        if len(self.names) == 2:
            return dict(zip(self.names, place, strict=True))
        return {self.names[0]: list(place)}

    def describe(self, units: Units) -> dict[str, Any]:
        number = {"type": "number" if units.is_normalized else "integer"}
        if len(self.names) == 2:
            return {name: number for name in self.names}
        pair = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
        return {self.names[0]: {**pair, "description": "[x, y]"}}


class PathArgument(Argument):
    """A drag as a list of points `{"x": ..., "y": ...}`, of which the first and the last count."""

    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        name = self.names[0]
        path = cast("list[Any]", arguments[name])
        if not _is_list(path) or len(path) < 2 or not all(isinstance(p, dict) for p in path):
            raise TaskError(f'{name} must be a list of two or more points {{"x": x, "y": y}}')
        points = [
            units.find_point(f"{name}[{i}]", p.get("x"), p.get("y")) for i, p in enumerate(path)
        ]
        return {"start": points[0], "point": points[-1]}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        ends = [end for end in (action.start, action.point) if end is not None]
        places = [units.place_point(end) for end in ends]
        return {self.names[0]: [{"x": x, "y": y} for x, y in places]}

    def describe(self, units: Units) -> dict[str, Any]:
        number = {"type": "number" if units.is_normalized else "integer"}
        point = {"type": "object", "properties": {"x": number, "y": number}, "required": ["x", "y"]}
        return {self.names[0]: {"type": "array", "items": point, "minItems": 2}}


class TextArgument(Argument):
    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        return {"text": self._take(arguments, str, "a string")}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        return {self.names[0]: action.text}

    def describe(self, units: Units) -> dict[str, Any]:
        return {self.names[0]: {"type": "string"}}


@dataclass(frozen=True, slots=True)
class KeysArgument(Argument):
    """Keys pressed together: `ctrl+a`, or with `is_list` one string each."""

    dialect: KeyNames = "x"
    is_list: bool = False

    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        name, value = self.names[0], arguments[self.names[0]]
        if self.is_list:
            keys = cast("list[Any]", value) if _is_list(value) else []
        else:
            keys = value.split("+") if isinstance(value, str) and value != "+" else [value]
        fit = 0 < len(keys) <= _MOST_KEYS and all(isinstance(key, str) and key for key in keys)
        if not fit:
            example = '["CTRL", "A"]' if self.dialect == "openai" else '["Control", "a"]'
            wanted = f"a list of keys, such as {example}" if self.is_list else "keys, as ctrl+a"
            raise TaskError(f"{name} must be {wanted}")
        return {self.fields[0]: tuple(read_key(key.strip() or key) for key in keys)}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        keys = [write_key(key, self.dialect) for key in getattr(action, self.fields[0])]
        return {self.names[0]: keys if self.is_list else "+".join(keys)}

    def describe(self, units: Units) -> dict[str, Any]:
        if self.is_list:
            return {self.names[0]: {"type": "array", "items": {"type": "string"}}}
        return {self.names[0]: {"type": "string"}}


class DirectionArgument(Argument):
    """A scroll as a direction and a number of notches; without a number, 3."""

    def fits(self, action: ScreenAction) -> bool:
        return not all(action.scroll)

    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        direction, amount = (arguments.get(name) for name in self.names)
        amount = 3 if amount is None else amount
        if not isinstance(direction, str) or direction not in _DIRECTIONS:
            raise TaskError(f"{self.names[0]} must be one of: {', '.join(_DIRECTIONS)}")
        if not _is_whole(amount, 0, _MOST_NOTCHES):
            raise TaskError(f"{self.names[1]} must be a whole number from 0 to {_MOST_NOTCHES}")
        right, down = _DIRECTIONS[direction]
        return {"scroll": (right * amount, down * amount)}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        right, down = action.scroll
        amount = abs(right or down)
        wanted = (right and right // amount, down and down // amount) if amount else (0, 1)
        direction = next(name for name, step in _DIRECTIONS.items() if step == wanted)
        return {self.names[0]: direction, self.names[1]: amount}

    def describe(self, units: Units) -> dict[str, Any]:
        amount = {"type": "integer", "description": "notches of the wheel", "minimum": 0}
        return {
            self.names[0]: {"type": "string", "enum": list(_DIRECTIONS)},
            self.names[1]: amount,
        }


class PixelsArgument(Argument):
    """A scroll in pixels to the right and down."""

    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        values = [arguments.get(name) or 0 for name in self.names]
        most = _MOST_NOTCHES * _NOTCH_PIXELS
        if not all(_is_whole(value, -most, most) for value in values):
            raise TaskError(f"{' and '.join(self.names)} must be whole numbers of pixels")
        right, down = (_to_notches(value) for value in values)
        return {"scroll": (right, down)}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        return {
            name: notches * _NOTCH_PIXELS
            for name, notches in zip(self.names, action.scroll, strict=True)
        }

    def describe(self, units: Units) -> dict[str, Any]:
        right, down = self.names
        return {
            right: {"type": "integer", "description": "pixels to the right"},
            down: {"type": "integer", "description": "pixels down"},
        }


class SecondsArgument(Argument):
    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        value = self._take(arguments, int | float, f"seconds, 0 to {_MOST_SECONDS}")  # pyright: ignore[reportArgumentType]
        if not 0 <= value <= _MOST_SECONDS:
            raise TaskError(f"{self.names[0]} must be seconds, 0 to {_MOST_SECONDS}")
        return {"seconds": value}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        return {self.names[0]: 1 if action.seconds is None else action.seconds}

    def describe(self, units: Units) -> dict[str, Any]:
        return {self.names[0]: {"type": "number", "description": "seconds"}}


@dataclass(frozen=True, slots=True)
class ButtonArgument(Argument):
    """A mouse button; `middle` is its name for the middle one."""

    middle: str = "middle"

    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        value = arguments[self.names[0]]
        if value not in ("left", "right", self.middle):
            raise TaskError(f"{self.names[0]} must be left, right or {self.middle}")
        return {"button": "middle" if value == self.middle else value}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        return {self.names[0]: self.middle if action.button == "middle" else action.button}

    def describe(self, units: Units) -> dict[str, Any]:
        return {self.names[0]: {"type": "string", "enum": ["left", "right", self.middle]}}


class ClicksArgument(Argument):
    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        if not _is_whole(arguments[self.names[0]], 1, _MOST_CLICKS):
            raise TaskError(f"{self.names[0]} must be a whole number from 1 to {_MOST_CLICKS}")
        return {"clicks": arguments[self.names[0]]}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        return {self.names[0]: action.clicks}

    def describe(self, units: Units) -> dict[str, Any]:
        return {self.names[0]: {"type": "integer", "minimum": 1, "maximum": _MOST_CLICKS}}


class EnterArgument(Argument):
    def read(self, arguments: Arguments, units: Units) -> Mapping[str, Any]:
        return {"enter": self._take(arguments, bool, "true or false")}

    def write(self, action: ScreenAction, units: Units) -> dict[str, Any]:
        return {self.names[0]: action.enter}

    def describe(self, units: Units) -> dict[str, Any]:
        return {self.names[0]: {"type": "boolean"}}


def _is_list(value: object, length: int | None = None) -> bool:
    return isinstance(value, list) and length in (None, len(cast("list[object]", value)))


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _to_notches(pixels: int) -> int:
    """Return the notches of a scroll, away from zero: the smallest one still scrolls."""
    sign = -1 if pixels < 0 else 1
    return sign * -(-abs(pixels) // _NOTCH_PIXELS)
