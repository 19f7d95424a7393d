"""Bodies of requests, bounded on the wire and after decompression."""

import asyncio

import zstandard
from starlette.requests import Request

# A frame's own claim on memory.
_WINDOW_BYTES = 2**27


class BodyError(Exception):
    """A body is refused with a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(request: Request, most: int) -> bytes:
    """Return a body of at most so many bytes, decompressed. Raises BodyError, ClientDisconnect."""
    stated = request.headers.get("content-length", "0")
    if not stated.isdigit() or int(stated[:19]) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise BodyError(415, f"the content encoding {encoding[:40]!r} is not offered, only zstd")
    return await asyncio.to_thread(_decompress, body, most)


def _decompress(body: bytes, most: int) -> bytes:
    try:
        size = zstandard.get_frame_parameters(body).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise BodyError(400, "the zstd frame does not state the size of its content")
        if size > most:
            raise _too_large(most)
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        return decompressor.decompress(body, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BodyError(400, f"the body is not zstd: {error}") from error


def _too_large(most: int) -> BodyError:
    return BodyError(413, f"the body exceeds {most} bytes: send fewer data at a time")
