"""Standard input as a stream of lines, of which a terminal's may never end."""

import asyncio
import os
import sys
import threading
from contextlib import suppress

from flotilla_launcher.cli.terminal import CommandError

_LINE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16


def open_standard_input() -> asyncio.StreamReader:
    """Return standard input as a stream. A daemon thread reads it and is never joined: at a
    terminal, the read blocks until a line is typed. It reads unbuffered, because it would keep
    the buffer's lock."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    if sys.stdin is None:
        lines.feed_eof()
        return lines
    source = sys.stdin.fileno()

    def read_input() -> None:
        # The loop is closed if the episode ends before its input.
        with suppress(RuntimeError):
            while chunk := _read_chunk(source):
                loop.call_soon_threadsafe(lines.feed_data, chunk)
            loop.call_soon_threadsafe(lines.feed_eof)

    threading.Thread(target=read_input, name="standard input", daemon=True).start()
    return lines


def _read_chunk(source: int) -> bytes:
    """Read the available input; b"" at the end. A closed terminal reports its end as an error."""
    try:
        return os.read(source, _CHUNK_BYTES)
    except OSError:
        return b""


async def read_line(lines: asyncio.StreamReader) -> str:
    """Return the next non-empty line; "" at the end. Raises CommandError."""
    try:
        while line := await lines.readline():
            if text := line.decode("utf-8", "replace").strip():
                return text
    except ValueError as error:
        raise CommandError(f"a call is longer than {_LINE_BYTES} bytes") from error
    return ""
