"""The `computer` tool: what the policy sees of a screen, and where it points. Pure but for `scale`.

The policy may see a smaller picture than the screen, or, as Qwen's vision models do, point in
thousandths of it. Both are one linear map between the screen's pixels and the policy's
coordinates, applied to what the policy asks and to what the tool answers.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from services.common.parsing import Limits, aside, parse_json
from services.env_gateway.config.gateway import ScreenConfig
from services.env_gateway.episodes.task_format import TaskError
from services.env_gateway.ports import Media, Part, Text, Tool
from services.env_gateway.tools.tool_selection import COMPUTER

_DEFAULT_WIDTH, _DEFAULT_HEIGHT = 1366, 768
_THOUSANDTHS = 1000
_POINTS = ("coordinate", "start_coordinate")
_SIZE = re.compile(r"\b([1-9]\d{2,4})\s?[x×]\s?([1-9]\d{2,4})\b")  # noqa: RUF001
_POSITION = re.compile(r"\bX=(\d{1,9}),\s?Y=(\d{1,9})\b")
_DATA_URL = re.compile(r"data:(?P<mime>[\w.+-]+/[\w.+-]+);base64,")
_LOOKS = ("screenshot", "cursor_position")
# A picture in JSON text, with little around it.
_ANSWER = Limits(bytes=2**28, values=2**10)
_PNG = b"\x89PNG\r\n\x1a\n"


class UnreadableImageError(Exception):
    """The bytes are no picture that can be scaled."""


# A picture with neither side longer than so many pixels. Raises UnreadableImageError.
Scale = Callable[[Media, int], Awaitable[Media]]


@dataclass(frozen=True, slots=True)
class Size:
    """In pixels, or in the policy's units."""

    width: int
    height: int

    def fitted(self, max_side: int | None) -> "Size":
        """Shrunk, never grown, so that neither side exceeds `max_side`; the aspect ratio stays."""
        longest = max(self.width, self.height)
        if max_side is None or longest <= max_side:
            return self
        width = max(1, round(self.width * max_side / longest))
        return Size(width, max(1, round(self.height * max_side / longest)))


class Screen:
    """One environment's screen as one policy sees it.

    `pixels` is the screen itself, and `units` the range of the coordinates that the policy points
    with, exclusive.
    """

    def __init__(self, config: ScreenConfig, tool: Tool, scale: Scale) -> None:
        self.pixels = screen_size(tool)
        relative = config.coordinates == "relative1000"
        shown = self.pixels.fitted(config.max_side)
        self.units = Size(_THOUSANDTHS, _THOUSANDTHS) if relative else shown
        self._max_side = config.max_side
        self._scale = scale

    def describe(self, tool: Tool) -> Tool:
        """The tool as the policy is told of it: the size of the screen is that of its units."""
        if self.units == self.pixels:
            return tool
        size = f"{self.units.width}x{self.units.height}"
        known = _SIZE.sub(size, tool.description)
        schema = _SIZE.sub(size, tool.input_schema_json)
        rule = (
            f"Coordinates are [x, y] with x from 0 to {self.units.width - 1} and y from 0 to "
            f"{self.units.height - 1}, whatever the size of the picture."
        )
        return replace(tool, description=f"{known}\n{rule}".strip(), input_schema_json=schema)

    def to_pixels(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call, in the screen's pixels. Raises TaskError for a point beside it."""
        converted = dict(arguments)
        for name in _POINTS:
            if arguments.get(name) is not None:
                converted[name] = self._pixels(name, arguments[name])
        return converted

    async def shown_parts(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """An answer's pictures in the size, and its positions in the units, of the policy."""
        return tuple([await self._shown(await decoded_aside(part)) for part in parts])

    def _pixels(self, name: str, point: object) -> list[int]:
        values = cast("list[object]", point) if isinstance(point, list) else []
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(values) != 2 or len(numbers) != 2:
            raise TaskError(f"{name} must be [x, y], two numbers")
        x, y = numbers
        if not (0 <= x < self.units.width and 0 <= y < self.units.height):
            raise TaskError(
                f"{name} [{x:g}, {y:g}] is not on the screen: x must be 0 to "
                f"{self.units.width - 1} and y 0 to {self.units.height - 1}"
            )
        return [
            int(x * self.pixels.width / self.units.width),
            int(y * self.pixels.height / self.units.height),
        ]

    async def _shown(self, part: Part) -> Part:
        if isinstance(part, Text):
            return await aside(
                len(part.text), lambda: Text(_POSITION.sub(self._position, part.text))
            )
        if not part.mime.startswith("image/") or self._max_side is None:
            return part
        try:
            return await self._scale(part, self._max_side)
        except UnreadableImageError as error:
            # The call was executed: only its answer cannot be shown.
            return Text(f"(a picture that cannot be read: {error})")

    def _position(self, match: re.Match[str]) -> str:
        x, y = int(match[1]), int(match[2])
        x = min(x * self.units.width // self.pixels.width, self.units.width - 1)
        y = min(y * self.units.height // self.pixels.height, self.units.height - 1)
        return f"X={x},Y={y}"


async def unscaled(part: Media, max_side: int) -> Media:
    """Where nothing can scale, pictures stay as they are."""
    return part


def only_looks(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call changes nothing, so that it can be sent again."""
    return name == COMPUTER and arguments.get("action") in _LOOKS


def screen_of(tools: Mapping[str, Tool], config: ScreenConfig, scale: Scale) -> Screen | None:
    """The screen behind the tool `computer`, where it is offered."""
    tool = tools.get(COMPUTER)
    return None if tool is None else Screen(config, tool, scale)


def screen_size(tool: Tool) -> Size:
    """The resolution that the tool's description or schema names, else the usual one."""
    match = _SIZE.search(tool.description) or _SIZE.search(tool.input_schema_json)
    if match is None:
        return Size(_DEFAULT_WIDTH, _DEFAULT_HEIGHT)
    return Size(int(match[1]), int(match[2]))


async def decoded_aside(part: Part) -> Part:
    """Return what `decoded` does, off the event loop for a part that takes long."""
    return await aside(part_size(part), lambda: decoded(part))


def decoded(part: Part) -> Part:
    """Some servers answer with a picture as JSON text, {"base64_image": ...}: that is a picture."""
    if not isinstance(part, Text) or '"base64_image"' not in part.text:
        return part
    try:
        answer = parse_json(part.text, _ANSWER)
        encoded = answer["base64_image"]
    except (ValueError, KeyError, TypeError):
        return part
    if not encoded or not isinstance(encoded, str):
        return Text("Screenshot capture failed (null image)")
    match = _DATA_URL.match(encoded)
    mime = match["mime"] if match else "image/png"
    try:
        data = base64.b64decode(encoded[match.end() if match else 0 :], validate=True)
    except (binascii.Error, ValueError):
        return Text("Screenshot capture failed (the image is not base64)")
    return media(data, mime)


def part_size(part: Part) -> int:
    return len(part.text) if isinstance(part, Text) else len(part.data)


def media(data: bytes, mime: str) -> Media:
    """A part with its hash; its size in pixels where it is a PNG."""
    width = height = 0
    if data.startswith(_PNG) and len(data) >= 24:
        width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    return Media(data, mime, hashlib.sha256(data).digest(), len(data), width, height)
