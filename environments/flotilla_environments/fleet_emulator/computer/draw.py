"""Rendering of a screen as a PNG; equal elements give equal bytes."""

import io
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from flotilla_environments.fleet_emulator.computer.layout import HEIGHT, WIDTH, Element

_BACKGROUND, _INK, _PAPER = "#f2f4f7", "#1b2430", "#ffffff"
_BAR, _ACCENT, _EDGE = "#243b53", "#2f6fde", "#8c98a6"
_POINTER = ((0, 0), (0, 18), (5, 13), (12, 13))


@cache
def _load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def draw_screen(elements: list[Element], pointer: tuple[int, int]) -> bytes:
    image = Image.new("RGB", (WIDTH, HEIGHT), _BACKGROUND)
    canvas = ImageDraw.Draw(image)
    for element in elements:
        _draw_element(canvas, element)
    canvas.polygon([(pointer[0] + x, pointer[1] + y) for x, y in _POINTER], _INK, _PAPER)
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=3)
    return png.getvalue()


def _draw_element(canvas: ImageDraw.ImageDraw, element: Element) -> None:
    box = element.box
    edges = (box.left, box.top, box.left + box.width - 1, box.top + box.height - 1)
    ink, size = _INK, 16
    if element.kind == "title":
        canvas.rectangle(edges, _BAR)
        ink, size = _PAPER, 22
    elif element.kind == "button":
        canvas.rounded_rectangle(edges, 6, _ACCENT if element.active else _PAPER, _EDGE)
        ink = _PAPER if element.active else _INK
    elif element.kind == "field":
        canvas.rectangle(edges, _PAPER, _ACCENT if element.active else _EDGE, 2)
    size = min(size, box.height)
    canvas.text(
        (box.left + 8, box.top + box.height // 2), element.text, ink, _load_font(size), "lm"
    )
