"""Odd files of pictures, as environments may send them, and what becomes of each."""

import io
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

# A picture's bytes are kept, or it is written anew.
KEPT, ANEW = "kept", "anew"
RED = (200, 30, 60)


@dataclass(frozen=True)
class Odd:
    """A file, the type under which it is sent, and its size once it is read; or why it is refused:
    a pattern."""

    make: Callable[[], bytes]
    becomes: str
    size: tuple[int, int] = (40, 24)
    mime: str = "image/png"

    @property
    def is_read(self) -> bool:
        return self.becomes in (KEPT, ANEW)


def _save(image: Image.Image, kind: str, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def _plain(mode: str = "RGB", size: tuple[int, int] = (40, 24)) -> Image.Image:
    """Return a red picture, blue in the upper left."""
    image = Image.new("RGB", size, RED)
    image.paste((20, 40, 220), (0, 0, size[0] // 2, size[1] // 2))
    return image.convert(mode)


def _noise(width: int, height: int) -> bytes:
    drawn = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return _save(Image.fromarray(drawn), "PNG", compress_level=0)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checked = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checked)


def _png(width: int, height: int, rows: bytes, *, depth: int = 8, interlaced: int = 0) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, interlaced)
    chunks = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _interlaced() -> bytes:
    """Return a PNG in seven passes, as slow connections showed it early."""
    pixels = np.asarray(_plain())
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2)]
    rows = b""
    for top, left, down, right in [*passes, (1, 0, 2, 1)]:
        for row in pixels[top::down, left::right]:
            rows += b"\0" + row.tobytes()
    return _png(40, 24, rows, interlaced=1)


def _deep() -> bytes:
    """Return a PNG of 16 bits a colour."""
    pixels = np.asarray(_plain()).astype(">u2") * 257
    return _png(40, 24, b"".join(b"\0" + row.tobytes() for row in pixels), depth=16)


def _grey16() -> bytes:
    shades = np.linspace(0, 65535, 40 * 24).reshape(24, 40).astype(np.uint16)
    return _save(Image.fromarray(shades), "PNG")


def _turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _save(_plain(), "JPEG", exif=exif, quality=95)


def _see_through() -> Image.Image:
    """Return a picture that is transparent but for a red square in the upper left."""
    image = Image.new("RGBA", (40, 24), (0, 0, 0, 0))
    image.paste((*RED, 255), (0, 0, 20, 12))
    return image


def _moving(kind: str) -> bytes:
    later = [Image.new("RGB", (40, 24), color) for color in ("black", "white")]
    return _save(_plain(), kind, save_all=True, append_images=later, duration=50)


def _spoiled() -> bytes:
    """Return a PNG with a damaged chunk of pixels."""
    data = bytearray(_noise(64, 64))
    data[len(data) // 2] ^= 255
    return bytes(data)


def _bomb() -> bytes:
    """Return 58 bytes that claim to be 3.6 thousand million pixels."""
    return _png(60_000, 60_000, b"")


def _text_bomb() -> bytes:
    """Return a PNG with a comment of 200 MB, compressed to 200 kB."""
    plain = _save(_plain(), "PNG")
    comment = _chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(200 * 2**20), 9))
    return plain[:33] + comment + plain[33:]


def _damaged_profile() -> bytes:
    """Return a PNG with a colour profile of a wrong checksum, as a public MCP server sends one."""
    plain, profile = _save(_plain(), "PNG"), _chunk(b"iCCP", b"p\0\0" + zlib.compress(b"profile"))
    return plain[:33] + profile[:-1] + bytes([profile[-1] ^ 255]) + plain[33:]


def _icon() -> bytes:
    return _save(_plain(size=(32, 32)), "ICO")


_PDF = b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
_SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'
_HTML = b"<!doctype html><title>502 Bad Gateway</title><h1>Bad Gateway</h1>"
_NO_FORMAT = r"it is none of PNG, JPEG, WEBP, GIF, BMP, TIFF"
_JPEG = "image/jpeg"

ODD: Mapping[str, Odd] = {
    "a plain PNG": Odd(lambda: _save(_plain(), "PNG"), KEPT),
    "a plain JPEG": Odd(lambda: _save(_plain(), "JPEG"), KEPT, mime=_JPEG),
    "one pixel": Odd(lambda: _save(_plain(size=(1, 1)), "PNG"), KEPT, (1, 1)),
    "8k wide": Odd(lambda: _save(_plain(size=(8192, 64)), "PNG"), KEPT, (8192, 64)),
    "a screen of 8k": Odd(
        lambda: _save(_plain(size=(7680, 4320)), "PNG", compress_level=1), KEPT, (7680, 4320)
    ),
    "odd sides": Odd(lambda: _save(_plain(size=(13, 7)), "JPEG"), KEPT, (13, 7), _JPEG),
    "a progressive JPEG": Odd(lambda: _save(_plain(), "JPEG", progressive=True), KEPT, mime=_JPEG),
    "a colour profile": Odd(
        lambda: _save(_plain(), "JPEG", icc_profile=b"profile" * 100), KEPT, mime=_JPEG
    ),
    "a JPEG with more behind it": Odd(
        lambda: _save(_plain(), "JPEG") + b"trailer" * 99, KEPT, mime=_JPEG
    ),
    "an interlaced PNG": Odd(_interlaced, KEPT),
    "16 bits a colour": Odd(_deep, KEPT),
    "10 MB": Odd(lambda: _noise(1900, 1800), KEPT, (1900, 1800)),
    "a PNG under a JPEG's type": Odd(lambda: _save(_plain(), "PNG"), KEPT, mime=_JPEG),
    "a PNG under a type in capitals": Odd(lambda: _save(_plain(), "PNG"), KEPT, mime="image/PNG"),
    "upright by EXIF": Odd(lambda: _turned(1), KEPT, mime=_JPEG),
    "turned by EXIF": Odd(lambda: _turned(6), ANEW, (24, 40), _JPEG),
    "mirrored by EXIF": Odd(lambda: _turned(2), ANEW, mime=_JPEG),
    "CMYK": Odd(lambda: _save(_plain("CMYK"), "JPEG"), ANEW, mime=_JPEG),
    "a grey JPEG": Odd(lambda: _save(_plain("L"), "JPEG"), ANEW, mime=_JPEG),
    "a grey PNG": Odd(lambda: _save(_plain("L"), "PNG"), ANEW),
    "16 bits of grey": Odd(_grey16, ANEW),
    "one bit": Odd(lambda: _save(_plain("1"), "PNG"), ANEW),
    "a palette": Odd(lambda: _save(_plain().quantize(8), "PNG"), ANEW),
    "a palette with transparency": Odd(
        lambda: _save(_see_through().convert("P"), "PNG", transparency=0), ANEW
    ),
    "transparency": Odd(lambda: _save(_see_through(), "PNG"), ANEW),
    "grey with transparency": Odd(lambda: _save(_see_through().convert("LA"), "PNG"), ANEW),
    "one transparent colour": Odd(lambda: _save(_plain(), "PNG", transparency=RED), ANEW),
    "a damaged colour profile": Odd(_damaged_profile, ANEW),
    "an animated PNG": Odd(lambda: _moving("PNG"), ANEW),
    "an animated GIF": Odd(lambda: _moving("GIF"), ANEW, mime="image/gif"),
    "an animated WebP": Odd(lambda: _moving("WEBP"), ANEW, mime="image/webp"),
    "several pictures of a camera": Odd(lambda: _moving("MPO"), ANEW, mime=_JPEG),
    "WebP": Odd(lambda: _save(_plain(), "WEBP", quality=95), ANEW, mime="image/webp"),
    "WebP with transparency": Odd(
        lambda: _save(_see_through(), "WEBP", lossless=True), ANEW, mime="image/webp"
    ),
    "BMP": Odd(lambda: _save(_plain(), "BMP"), ANEW, mime="image/bmp"),
    "TIFF": Odd(
        lambda: _save(_plain(), "TIFF", compression="tiff_deflate"), ANEW, mime="image/tiff"
    ),
    "CMYK in TIFF": Odd(lambda: _save(_plain("CMYK"), "TIFF"), ANEW, mime="image/tiff"),
    "17 MB": Odd(lambda: _noise(2500, 2300), r"1725\d{4} bytes are more than 16777216"),
    "more than a screen of 8k": Odd(
        lambda: _save(Image.new("1", (8192, 4200)), "PNG"), "8192x4200 pixels are more than"
    ),
    "a decompression bomb": Odd(_bomb, "pixels"),
    "a comment of 200 MB": Odd(_text_bomb, "it cannot be read: .*too large"),
    "a PNG without its end": Odd(lambda: _noise(64, 64)[:6000], "it cannot be read: .*truncated"),
    "a JPEG without its end": Odd(
        lambda: _save(_plain(size=(400, 400)), "JPEG")[:2000],
        "it cannot be read: .*truncated",
        mime=_JPEG,
    ),
    "a damaged PNG": Odd(_spoiled, "it cannot be read: "),
    "no width": Odd(lambda: _png(0, 9, b"\0" * 9), _NO_FORMAT),
    "an icon": Odd(_icon, _NO_FORMAT, mime="image/x-icon"),
    "SVG": Odd(lambda: _SVG, _NO_FORMAT, mime="image/svg+xml"),
    "PDF": Odd(lambda: _PDF, _NO_FORMAT),
    "an error page": Odd(lambda: _HTML, _NO_FORMAT),
    "nothing": Odd(lambda: b"", _NO_FORMAT),
}


@cache
def odd_file(name: str) -> bytes:
    return ODD[name].make()
