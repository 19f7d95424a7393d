"""Pictures that are made here, for checks of models."""

import io
from functools import cache

import numpy as np
from PIL import Image

from flotilla_common.images.picture import Picture
from flotilla_common.images.picture_files import read_picture

_NOISE_SIDE = 64
_NOISE_SEED = 45


@cache
def noise_picture() -> Picture:
    """Return a picture of noise, always of the same pixels: any fault of a tower shows in it."""
    drawn = np.random.default_rng(_NOISE_SEED)
    pixels = drawn.integers(0, 256, (_NOISE_SIDE, _NOISE_SIDE, 3), np.uint8)
    return _write(Image.fromarray(pixels))


def plain_picture(width: int, height: int, colour: int = 0) -> Picture:
    """Return a picture of one colour, 0xRRGGBB; black by default."""
    return _write(Image.new("RGB", (width, height), f"#{colour:06x}"))


def _write(image: Image.Image) -> Picture:
    written = io.BytesIO()
    image.save(written, "PNG")
    return read_picture(written.getvalue())
