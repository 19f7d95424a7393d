"""Files of pictures as policies see them: PNG or JPEG, in RGB, upright, of one frame."""

import hashlib
import io
import zlib
from collections.abc import Generator
from contextlib import contextmanager

from PIL import Image, ImageOps, UnidentifiedImageError

from flotilla_common.images.picture import Picture

# More pixels are refused before decoding: a small file can hold a huge picture. The largest screens
# have 7680 x 4320.
MOST_PIXELS = 32 * 2**20
# Bytes of one file.
MOST_BYTES = 16 * 2**20
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_PNG = b"\x89PNG\r\n\x1a\n"
_MIMES = {"PNG": "image/png", "JPEG": "image/jpeg"}
# Characters of Pillow's own errors.
_MOST_REASON = 200


class PictureRefused(ValueError):
    """Bytes that are no picture, or none that a policy can be shown; the message says why."""


def read_picture(data: bytes) -> Picture:
    """Return the picture in a file. One that is plain already keeps its bytes; any other, such as
    one with a palette, with transparency or turned by EXIF, is written anew as PNG. Damaged extras
    of a PNG, such as a colour profile, are left out.

    Decodes the whole file, some of it while no other thread runs: services do so in
    `picture_process.py`. Raises PictureRefused."""
    check_bytes(len(data))
    data = _drop_damaged_extras(data)
    with _refusing_broken(), Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
        _check_size(*opened.size)
        kind, size = str(opened.format), opened.size
        opened.load()
        if not _is_plain(opened):
            image = _make_plain(opened)
            written = io.BytesIO()
            # Pillow's default takes three times as long, and saves little.
            image.save(written, "PNG", compress_level=1)
            kind, size, data = "PNG", image.size, written.getvalue()
            check_bytes(len(data))
    return Picture(hashlib.sha256(data).hexdigest(), _MIMES[kind], *size, data)


def shrink_picture(data: bytes, max_side: int) -> bytes | None:
    """Return the picture in a file as a plain PNG with no side longer than `max_side` pixels, or
    None if none of its sides is longer.

    Raises PictureRefused for what `read_picture` refuses, but for a file of too many bytes."""
    data = _drop_damaged_extras(data)
    with _refusing_broken(), Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
        _check_size(*opened.size)
        if max(opened.size) <= max_side:
            return None
        image = opened if _is_plain(opened) else _make_plain(opened)
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
        written = io.BytesIO()
        image.save(written, "PNG")
    return written.getvalue()


def check_bytes(size: int) -> None:
    """Refuse a file of too many bytes. Raises PictureRefused."""
    if size > MOST_BYTES:
        raise PictureRefused(f"{size} bytes are more than {MOST_BYTES}")


def decode_picture(data: bytes) -> Image.Image:
    """Return the pixels of a picture's bytes, in RGB. Raises PictureRefused."""
    with _refusing_broken(), Image.open(io.BytesIO(data), formats=tuple(_MIMES)) as image:
        return image.convert("RGB")


def read_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a picture's bytes, in pixels, without decoding them.

    Raises PictureRefused for bytes that `read_picture` does not return."""
    with _refusing_broken(), Image.open(io.BytesIO(data), formats=tuple(_MIMES)) as image:
        size, mode = image.size, image.mode
    _check_size(*size)
    if mode != "RGB":
        raise PictureRefused(f"the picture is in {mode}, not in RGB")
    return size


def _drop_damaged_extras(data: bytes) -> bytes:
    """Return a PNG without those of its extras, such as colour profiles, whose checksum is wrong:
    browsers leave them out, and Pillow refuses the file. Other bytes are returned as they are."""
    kept, begin, at, kind = list[bytes](), 0, len(_PNG), b""
    while data.startswith(_PNG) and at < len(data) and kind != b"IEND":
        end = at + 12 + int.from_bytes(data[at : at + 4])
        kind, checked = data[at + 4 : at + 8], data[at + 4 : end - 4]
        # Of chunks that the pixels do not need, the name begins with a small letter.
        if kind[:1].islower() and zlib.crc32(checked).to_bytes(4) != data[end - 4 : end]:
            kept.append(data[begin:at])
            begin = end
        at = end
    return b"".join((*kept, data[begin:])) if kept else data


@contextmanager
def _refusing_broken() -> Generator[None]:
    """Raise PictureRefused for Pillow's errors: its readers raise any of them for broken files."""
    try:
        yield
    except PictureRefused:
        raise
    except UnidentifiedImageError as error:
        # Its own text has an address in memory, and all attempts must read the same.
        raise PictureRefused(f"it is none of {', '.join(_FORMATS)}") from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise PictureRefused(f"it cannot be read: {reason}"[:_MOST_REASON]) from error


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise PictureRefused(f"{width}x{height} pixels are more than {MOST_PIXELS}")


def _is_plain(image: Image.Image) -> bool:
    turned = image.getexif().get(0x0112, 1) != 1
    frames = getattr(image, "n_frames", 1)
    plain = image.mode == "RGB" and "transparency" not in image.info
    return image.format in _MIMES and plain and frames == 1 and not turned


def _make_plain(image: Image.Image) -> Image.Image:
    """Return the first frame, upright, with transparent parts on white."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        # Pillow would take all but the darkest shades for white.
        return upright.convert("I").point(lambda value: value * (1 / 257)).convert("RGB")
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        layered = upright.convert("RGBA")
        ground = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(ground, layered).convert("RGB")
    return upright.convert("RGB")
