"""Files of pictures as policies see them: PNG or JPEG, in RGB, upright, of one frame."""

import hashlib
import io

from PIL import Image, ImageOps, UnidentifiedImageError

from services.common.images.picture import Picture

# More pixels are refused before decoding: a small file can hold a huge picture. The largest screens
# have 7680 x 4320.
MOST_PIXELS = 32 * 2**20
# Bytes of one file.
MOST_BYTES = 16 * 2**20
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MIMES = {"PNG": "image/png", "JPEG": "image/jpeg"}
# Pillow's errors for broken files: SyntaxError is for chunks of PNG files.
_BROKEN = (
    UnidentifiedImageError,
    OSError,
    ValueError,
    SyntaxError,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


class PictureRefused(ValueError):
    """Bytes that are no picture, or none that a policy can be shown; the message says why."""


def read_picture(data: bytes) -> Picture:
    """Return the picture in a file. One that is plain already keeps its bytes; any other, such as
    one with a palette, with transparency or turned by EXIF, is written anew as PNG.

    Decodes the whole file, which takes tens of milliseconds: call it off the event loop. Raises
    PictureRefused."""
    if len(data) > MOST_BYTES:
        raise PictureRefused(f"{len(data)} bytes are more than {MOST_BYTES}")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            _check_size(*opened.size)
            kind, size = str(opened.format), opened.size
            opened.load()
            if not _is_plain(opened):
                image = _make_plain(opened)
                written = io.BytesIO()
                image.save(written, "PNG")
                kind, size, data = "PNG", image.size, written.getvalue()
    except PictureRefused:
        raise
    except _BROKEN as error:
        raise PictureRefused(f"the picture cannot be read: {error}"[:200]) from error
    return Picture(hashlib.sha256(data).hexdigest(), _MIMES[kind], *size, data)


def decode_picture(data: bytes) -> Image.Image:
    """Return the pixels of a picture's bytes, in RGB. Raises PictureRefused."""
    try:
        with Image.open(io.BytesIO(data), formats=tuple(_MIMES)) as image:
            return image.convert("RGB")
    except _BROKEN as error:
        raise PictureRefused(f"the picture cannot be read: {error}"[:200]) from error


def read_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a picture's bytes, in pixels, without decoding them.

    Raises PictureRefused for bytes that `read_picture` does not return."""
    try:
        with Image.open(io.BytesIO(data), formats=tuple(_MIMES)) as image:
            size, mode = image.size, image.mode
    except _BROKEN as error:
        raise PictureRefused(f"the picture cannot be read: {error}"[:200]) from error
    _check_size(*size)
    if mode != "RGB":
        raise PictureRefused(f"the picture is in {mode}, not in RGB")
    return size


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise PictureRefused(f"{width}x{height} pixels are more than {MOST_PIXELS}")


def _is_plain(image: Image.Image) -> bool:
    turned = image.getexif().get(0x0112, 1) != 1
    frames = getattr(image, "n_frames", 1)
    return image.format in _MIMES and image.mode == "RGB" and frames == 1 and not turned


def _make_plain(image: Image.Image) -> Image.Image:
    """Return the first frame, upright, with transparent parts on white."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        layered = upright.convert("RGBA")
        ground = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(ground, layered).convert("RGB")
    return upright.convert("RGB")
