"""Server-sent events of an HTTP answer, read with bounded memory and bounded work per turn of the
event loop."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from flotilla_common.text.parsing import TooLargeError

# Lines processed before other tasks get their turn.
LINES_AT_ONCE = 512


@dataclass(slots=True)
class Event:
    """One event: its kind and data, the id to resume after it, and the server's wish how many
    seconds to wait before that."""

    kind: str = "message"
    data: list[bytes] = field(default_factory=list[bytes])
    event_id: str | None = None
    retry_s: float | None = None

    @property
    def text(self) -> bytes:
        return b"\n".join(self.data)

    def take_line(self, line: bytes) -> None:
        """Take one line of the event, by its field; unknown fields and comments are ignored."""
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self.data.append(value)
        elif name == b"event":
            self.kind = value.decode("utf-8", "replace")
        elif name == b"id":
            self.event_id = value.decode("utf-8", "replace")
        elif name == b"retry":
            with suppress(ValueError):
                self.retry_s = int(value) / 1e3


async def read_events(answer: aiohttp.ClientResponse, max_bytes: int) -> AsyncGenerator[Event]:
    """Yield the events of a stream, also those without data, up to its end.

    Raises TooLargeError for an event of more than `max_bytes`."""
    # Pieces of an unfinished line, joined only once because it may be a whole picture.
    rest: list[bytes] = []
    event, size = Event(), 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            raise TooLargeError(f"it has more than {max_bytes} bytes")
        *lines, last = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join((*rest, lines[0]))
            rest.clear()
        rest.append(last)
        for number, line in enumerate(lines, 1):
            if stripped := line.rstrip(b"\r"):
                event.take_line(stripped)
            elif event != Event():
                yield event
                event, size = Event(), len(last)
            if number % LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
