"""Scaling of pictures to a largest size, with Pillow."""

import asyncio
import io

from PIL import Image, UnidentifiedImageError

from services.common.images.picture_files import MOST_PIXELS
from services.env_gateway.ports import Media
from services.env_gateway.tools.computer_tool import ScreenSize, UnreadableImageError, make_media

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Pillow's errors for broken files: SyntaxError is for chunks of PNG files.
_BROKEN = (
    UnidentifiedImageError,
    OSError,
    ValueError,
    SyntaxError,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


async def scale_image(part: Media, max_side: int) -> Media:
    """Return the picture with no side longer than `max_side` pixels, as PNG if it had to shrink.

    Raises UnreadableImageError. Decoding takes milliseconds, and runs off the event loop."""
    return await asyncio.to_thread(_shrink_image, part, max_side)


def _shrink_image(part: Media, max_side: int) -> Media:
    try:
        with Image.open(io.BytesIO(part.data), formats=_FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise UnreadableImageError(f"{image.width}x{image.height} pixels are too many")
            size = ScreenSize(image.width, image.height).fit_within(max_side)
            if (size.width, size.height) == image.size:
                return part
            image.thumbnail((size.width, size.height), Image.Resampling.LANCZOS)
            written = io.BytesIO()
            image.save(written, "PNG")
    except _BROKEN as error:
        raise UnreadableImageError(f"{part.mime} of {part.size} bytes: {error}") from error
    return make_media(written.getvalue(), "image/png")
