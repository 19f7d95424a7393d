"""Pictures of the app's screens; equal tiles give equal bytes."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from flotilla_environments.screen.layout import BAR_HEIGHT, COLOURS, HEIGHT, WIDTH

_PAPER, _BAR, _EDGE, _DONE, _TICK = "#808488", "#5c6670", "#3c444c", "#ffffff", "#ffffff"
_TICK_LINE = ((44, 80), (58, 96), (86, 60))


def draw_screen(tiles: Sequence[Mapping[str, Any]], *, step: int, steps: int) -> bytes:
    """Draw a screen as a PNG: a bar with one mark for each of `steps`, and the tiles, if any.

    A screen without tiles shows a tick: nothing is left to do.
    """
    image = Image.new("RGB", (WIDTH, HEIGHT), _PAPER)
    canvas = ImageDraw.Draw(image)
    canvas.rectangle((0, 0, WIDTH - 1, BAR_HEIGHT - 1), _BAR)
    for mark in range(steps):
        left = 10 + 16 * mark
        canvas.ellipse((left, 10, left + 10, 20), _DONE if mark < step else _BAR, _EDGE)
    for tile in tiles:
        right, bottom = tile["left"] + tile["width"] - 1, tile["top"] + tile["height"] - 1
        canvas.rectangle((tile["left"], tile["top"], right, bottom), COLOURS[tile["colour"]], _EDGE)
    if not tiles:
        canvas.line(_TICK_LINE, _TICK, 8, "curve")
    png = io.BytesIO()
    image.save(png, "PNG")
    return png.getvalue()
