"""A screen between a policy and its environment. Pure except for `scale`.

The policy may be offered another vocabulary than the environment's tools speak, see a picture
smaller than the screen or, as Qwen's vision models do, point in thousandths of it. Its calls become
calls of the environment's tools, and its points their points; the answers' pictures and positions
become the policy's."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from flotilla_common.text.parsing import TextLimits, parse_json, run_aside
from flotilla_env_gateway.config.gateway import ScreenConfig
from flotilla_env_gateway.ports import BackendError, CallResult, Media, Part, Text, Tool
from flotilla_env_gateway.tools.action_vocabularies import VOCABULARIES
from flotilla_env_gateway.tools.offered_screen import ForeignScreen, ScreenCall, add_done, is_done
from flotilla_env_gateway.tools.screen_actions import LOOKS, ScreenAction, Units
from flotilla_env_gateway.tools.spoken_screen import (
    ScreenStep,
    SpokenScreen,
    find_screen_tools,
    find_vocabulary,
)
from flotilla_env_gateway.tools.tool_selection import NothingToOfferError

_DEFAULT_WIDTH, _DEFAULT_HEIGHT = 1366, 768
_THOUSANDTHS = 1000
# What a policy reads in place of a screenshot that its environment could not take.
NO_PICTURE = "Screenshot capture failed (null image)"
_SIZE = re.compile(r"\b([1-9]\d{2,4})\s?[x×]\s?([1-9]\d{2,4})\b")  # noqa: RUF001
_POSITION = re.compile(r"\bX=(\d{1,9}),\s?Y=(\d{1,9})\b")
_DATA_URL = re.compile(r"data:(?P<mime>[\w.+-]+/[\w.+-]+);base64,")
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

    `pixels` is the screen itself, `units` the range of the coordinates that the policy points with,
    and `offered` the tools that it is offered for the environment's."""

    def __init__(self, config: ScreenConfig, tools: Sequence[Tool], scale: ScaleImage) -> None:
        self.pixels = find_screen_size(tools)
        self._shown = self.pixels.fit_within(config.max_side)
        spoken = find_vocabulary(tools)
        chosen = VOCABULARIES[config.vocabulary or spoken.name]
        self.units = self._find_units(config.coordinates or chosen.units, self._shown)
        own = self._find_units(spoken.units, self.pixels)
        self._spoken = SpokenScreen(spoken, tools, own)
        self._vocabulary = chosen
        # Tools of their own state the units of each coordinate: they are described anew.
        is_foreign = chosen != spoken or (not spoken.verb_key and self.units != own)
        foreign = ForeignScreen(chosen, self._spoken, self.units) if is_foreign else None
        self._foreign = foreign
        self._max_side = config.max_side
        self._scale = scale
        # The environment's, as it listed them.
        self.own = {tool.name: tool for tool in tools}
        if foreign is not None:
            listed = foreign.list_tools(self._rule)
        else:
            listed = [self.describe_tool(tool) for tool in add_done(tools, spoken)]
        self.offered: Mapping[str, Tool] = {tool.name: tool for tool in listed}

    @property
    def look(self) -> ScreenStep | None:
        """The environment's call that shows the screen, if it has one."""
        steps = self._spoken.find_steps(ScreenAction("screenshot"))
        return steps[0] if steps else None

    def describe_tool(self, tool: Tool) -> Tool:
        """Return an environment's tool as described to the policy, with the screen's size in the
        policy's units."""
        if self.units == self._spoken.units:
            return tool
        size = f"{self.units.width}x{self.units.height}"
        known = tool.description if self.units.is_normalized else _SIZE.sub(size, tool.description)
        schema = tool.input_schema_json
        schema = schema if self.units.is_normalized else _SIZE.sub(size, schema)
        return replace(tool, description=f"{known}\n{self._rule}".strip(), input_schema_json=schema)

    def plan_call(self, name: str, arguments: Mapping[str, Any]) -> ScreenCall:
        """Return what a policy's call of an offered tool means. Raises TaskError, which it reads,
        for one that the screen cannot take, such as a point beside it."""
        if is_done(self._vocabulary, name, arguments):
            return ScreenCall(done=True)
        if self._foreign is not None:
            return ScreenCall(self._foreign.plan_call(name, arguments))
        converted = self._spoken.convert_points(arguments, self.units)
        verb = self._vocabulary.find_verb(name, arguments)
        looks = verb is not None and verb.kind in LOOKS
        return ScreenCall((ScreenStep(self.own[name], converted, looks),))

    async def convert_parts(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Convert an answer's pictures to the policy's size, and its positions to the policy's
        units."""
        return tuple([await self._convert_part(await decoded_aside(part)) for part in parts])

    def _find_units(self, coordinates: str, pixels: ScreenSize) -> Units:
        if coordinates == "normalized":
            return Units(1, 1, is_normalized=True)
        if coordinates == "relative1000":
            return Units(_THOUSANDTHS, _THOUSANDTHS)
        return Units(pixels.width, pixels.height)

    @property
    def _rule(self) -> str:
        if self.units.is_normalized:
            return "Coordinates are x and y, numbers from 0 to 1 of the screen's width and height."
        return (
            f"Coordinates are [x, y] with x from 0 to {self.units.width - 1} and y from 0 to "
            f"{self.units.height - 1}, whatever the size of the picture."
        )

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
        point = (
            Fraction(int(match[1]), self.pixels.width),
            Fraction(int(match[2]), self.pixels.height),
        )
        x, y = self.units.place_point(point)
        return f"X={x:g},Y={y:g}"


async def keep_unscaled(part: Media, max_side: int) -> Media:
    """Return a picture unchanged, for gateways that cannot scale."""
    return part


def make_screen(
    tools: Mapping[str, Tool], config: ScreenConfig, scale: ScaleImage
) -> Screen | None:
    """Create the screen behind an environment's tools, if some of them are one."""
    found = find_screen_tools([*tools.values()])
    return Screen(config, found, scale) if found else None


def offer_screen(chosen: Mapping[str, Tool], screen: Screen | None) -> Mapping[str, Tool]:
    """Return the tools with a screen's as the policy is offered them, in the place of the
    environment's. Raises NothingToOfferError if another tool has the name of one."""
    if screen is None:
        return chosen
    others = [name for name in chosen if name not in screen.own]
    for name in screen.offered:
        if name in others:
            raise NothingToOfferError(
                f"the environment has a tool {name!r} beside its screen, as the vocabulary that is"
                " offered: set another env_gateway.screen.vocabulary"
            )
    first = next(iter(screen.own))
    offered: dict[str, Tool] = {}
    for name, tool in chosen.items():
        offered |= screen.offered if name == first else {} if name in screen.own else {name: tool}
    return offered


async def parse_first_screenshot(result: CallResult) -> Sequence[Part]:
    """Return the parts of a first screenshot. Raises BackendError if it is no picture (yet)."""
    parts = [await decoded_aside(part) for part in result.parts]
    shown = any(isinstance(p, Media) and p.mime.startswith("image/") and p.size for p in parts)
    if result.is_error or not shown:
        message = f"the first screenshot is no picture: {summarize_parts(parts)}"
        raise BackendError("no_screenshot", message, delivered=False)
    return parts


def summarize_parts(parts: Sequence[Part]) -> str:
    shown = [part.mime if isinstance(part, Media) else part.text[:200] for part in parts]
    return "; ".join(shown) or "nothing"


def find_screen_size(tools: Sequence[Tool]) -> ScreenSize:
    """Find the resolution in the tools' descriptions or schemas; use the default if they name
    none."""
    texts = [text for tool in tools for text in (tool.description, tool.input_schema_json)]
    match = next(filter(None, map(_SIZE.search, texts)), None)
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
        return Text(NO_PICTURE)
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
