"""Scaling of pictures to a largest size, with Pillow."""

import asyncio

from flotilla_common.images.picture_files import PictureRefused, shrink_picture
from flotilla_env_gateway.ports import Media
from flotilla_env_gateway.tools.computer_tool import UnreadableImageError, make_media


async def scale_image(part: Media, max_side: int) -> Media:
    """Return the picture with no side longer than `max_side` pixels, as PNG if it had to shrink.

    Raises UnreadableImageError. Decoding takes milliseconds, and runs off the event loop."""
    try:
        data = await asyncio.to_thread(shrink_picture, part.data, max_side)
    except PictureRefused as error:
        raise UnreadableImageError(f"{part.mime} of {part.size} bytes: {error}") from error
    return part if data is None else make_media(data, "image/png")
