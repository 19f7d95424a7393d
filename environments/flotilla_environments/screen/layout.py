"""Where tiles lie on a screen, in pixels, and their colours."""

import random
from typing import Any

WIDTH, HEIGHT = 128, 128
BAR_HEIGHT = 32
PLACE = 32  # a side of the places for tiles, each of which is smaller
PLACES = [(x, y) for y in range(BAR_HEIGHT, HEIGHT, PLACE) for x in range(0, WIDTH, PLACE)]
TILES = 4
COLOURS = {
    "red": "#e61e1e",
    "green": "#1ec81e",
    "blue": "#1e1ee6",
    "yellow": "#e6e61e",
    "cyan": "#1edcdc",
    "pink": "#e61ee6",
}


def draw_tiles(rng: random.Random, colour: str | None) -> list[dict[str, Any]]:
    """Draw the tiles of a screen: each has its own colour, and the first `colour` if that is
    given."""
    others = [name for name in COLOURS if name != colour]
    colours = [colour, *rng.sample(others, TILES - 1)] if colour else rng.sample(others, TILES)
    tiles: list[dict[str, Any]] = []
    for name, (x, y) in zip(colours, rng.sample(PLACES, TILES), strict=True):
        width, height = rng.randint(20, 28), rng.randint(20, 28)
        left, top = x + rng.randint(2, PLACE - 2 - width), y + rng.randint(2, PLACE - 2 - height)
        box = {"left": left, "top": top, "width": width, "height": height}
        tiles.append({"colour": name, **box})
    return tiles
