"""The `computer` tool: the policy's view of a screen and its coordinates. Pure except for
`scale`.

The policy may see a picture smaller than the screen or, as Qwen's vision models do, point
in thousandths of it. Both are one linear map between the screen's pixels and the policy's
coordinates. It is applied to the policy's arguments and to the tool's answers."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from services.common.tasks.task_format import TaskError
from services.common.text.parsing import TextLimits, parse_json, run_aside
from services.env_gateway.config.gateway import ScreenConfig
from services.env_gateway.ports import Media, Part, Text, Tool
from services.env_gateway.tools.tool_selection import COMPUTER

_DEFAULT_WIDTH, _DEFAULT_HEIGHT = 1366, 768
_THOUSANDTHS = 1000
_POINTS = ("coordinate", "start_coordinate")
_SIZE = re.compile(r"\b([1-9]\d{2,4})\s?[x×]\s?([1-9]\d{2,4})\b")  # noqa: RUF001
_POSITION = re.compile(r"\bX=(\d{1,9}),\s?Y=(\d{1,9})\b")
_DATA_URL = re.compile(r"data:(?P<mime>[\w.+-]+/[\w.+-]+);base64,")
_LOOKS = ("screenshot", "cursor_position")
# A picture in JSON text, with little else.
_ANSWER = TextLimits(bytes=2**28, values=2**10)
_PNG = b"\x89PNG\r\n\x1a\n"


class UnreadableImageError(Exception):
    """The bytes are not a picture that can be scaled."""


# Scales a picture so that no side exceeds so many pixels. Raises UnreadableImageError.
ScaleImage = Callable[[Media, int], Awaitable[Media]]


@dataclass(frozen=True, slots=True)
class ScreenSize:
    """Width and height, in pixels or in the policy's units."""

    width: int
    height: int

    def fit_within(self, max_side: int | None) -> "ScreenSize":
        """Shrink, never grow, so that neither side exceeds `max_side`; keep the aspect ratio."""
        longest = max(self.width, self.height)
        if max_side is None or longest <= max_side:
            return self
        width = max(1, round(self.width * max_side / longest))
        return ScreenSize(width, max(1, round(self.height * max_side / longest)))


class Screen:
    """One environment's screen as one policy sees it.

    `pixels` is the screen itself, and `units` the range of the coordinates that the policy points
    with, exclusive.
    """

    def __init__(self, config: ScreenConfig, tool: Tool, scale: ScaleImage) -> None:
        self.pixels = find_screen_size(tool)
        relative = config.coordinates == "relative1000"
        shown = self.pixels.fit_within(config.max_side)
        self.units = ScreenSize(_THOUSANDTHS, _THOUSANDTHS) if relative else shown
        self._max_side = config.max_side
        self._scale = scale

    def describe_tool(self, tool: Tool) -> Tool:
        """Return the tool as described to the policy, with the screen's size in the policy's
        units."""
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
        """Convert a call's arguments to the screen's pixels. Raises TaskError for a point off
        the screen."""
        converted = dict(arguments)
        for name in _POINTS:
            if arguments.get(name) is not None:
                converted[name] = self._point_to_pixels(name, arguments[name])
        return converted

    async def convert_parts(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Convert an answer's pictures to the policy's size, and its positions to the policy's
        units."""
        return tuple([await self._convert_part(await decoded_aside(part)) for part in parts])

    def _point_to_pixels(self, name: str, point: object) -> list[int]:
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

    async def _convert_part(self, part: Part) -> Part:
        if isinstance(part, Text):
            return await run_aside(
                len(part.text), lambda: Text(_POSITION.sub(self._convert_position, part.text))
            )
        if not part.mime.startswith("image/") or self._max_side is None:
            return part
        try:
            return await self._scale(part, self._max_side)
        except UnreadableImageError as error:
            # The call was executed: only its answer cannot be shown.
            return Text(f"(a picture that cannot be read: {error})")

    def _convert_position(self, match: re.Match[str]) -> str:
        x, y = int(match[1]), int(match[2])
        x = min(x * self.units.width // self.pixels.width, self.units.width - 1)
        y = min(y * self.units.height // self.pixels.height, self.units.height - 1)
        return f"X={x},Y={y}"


async def keep_unscaled(part: Media, max_side: int) -> Media:
    """Return a picture unchanged, for gateways that cannot scale."""
    return part


def is_look_only(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return True if a call changes nothing, so that it can be repeated."""
    return name == COMPUTER and arguments.get("action") in _LOOKS


def make_screen(
    tools: Mapping[str, Tool], config: ScreenConfig, scale: ScaleImage
) -> Screen | None:
    """Create the screen behind the tool `computer`, if it is offered."""
    tool = tools.get(COMPUTER)
    return None if tool is None else Screen(config, tool, scale)


def find_screen_size(tool: Tool) -> ScreenSize:
    """Find the resolution in the tool's description or schema; use the default if it names
    none."""
    match = _SIZE.search(tool.description) or _SIZE.search(tool.input_schema_json)
    if match is None:
        return ScreenSize(_DEFAULT_WIDTH, _DEFAULT_HEIGHT)
    return ScreenSize(int(match[1]), int(match[2]))


async def decoded_aside(part: Part) -> Part:
    """Call `decode_embedded_image`, off the event loop for a large part."""
    size = len(part.text) if isinstance(part, Text) else len(part.data)
    return await run_aside(size, lambda: decode_embedded_image(part))


def decode_embedded_image(part: Part) -> Part:
    """Decode a picture that a server sent as JSON text, {"base64_image": ...}; return any
    other part unchanged."""
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
    except ValueError:
        return Text("Screenshot capture failed (the image is not base64)")
    return make_media(data, mime)


def make_media(data: bytes, mime: str) -> Media:
    """Make a part with its hash, and with its size in pixels if it is a PNG."""
    width = height = 0
    if data.startswith(_PNG) and len(data) >= 24:
        width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    return Media(data, mime, hashlib.sha256(data).digest(), len(data), width, height)
