"""A player that reads colours off a picture."""

import io
from typing import Any

from PIL import Image, ImageColor

from flotilla_environments.api import Instance, Picture
from flotilla_environments.screen.layout import COLOURS, PLACE, PLACES


def read_places(png: bytes) -> dict[str, tuple[int, int]]:
    """The colours of the tiles on a picture, and the middle of the place of each."""
    image = Image.open(io.BytesIO(png))
    names = {ImageColor.getrgb(code): name for name, code in COLOURS.items()}
    found: dict[str, tuple[int, int]] = {}
    for x, y in PLACES:
        middle = (x + PLACE // 2, y + PLACE // 2)
        name = names.get(image.getpixel(middle))  # pyright: ignore[reportArgumentType]
        if name is not None:
            found[name] = middle
    return found


def use(instance: Instance, action: str, **arguments: Any) -> Picture:
    shown = instance.call("computer", {"action": action, **arguments})
    assert isinstance(shown, Picture)
    return shown


def play_by_looking(instance: Instance) -> None:
    """Click the colours that the task names where the pictures show them; else the first place."""
    shown = use(instance, "screenshot")
    for colour in instance.scenario.slots.values():
        x, y = read_places(shown.png).get(str(colour), (16, 48))
        shown = use(instance, "left_click", coordinate=[x, y])
