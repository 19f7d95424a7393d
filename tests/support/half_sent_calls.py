"""Calls whose message never ends, which no client library makes: HTTP/2 by hand."""

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

MESSAGE_BYTES = 2**20
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_HEADERS = 1, 4
_INITIAL_WINDOW = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# A window large enough for any answer of the server.
_ROOM = struct.pack(">I", 2**30)


class HalfSent:
    """One connection. Of each call it sends all of a message but the last byte, as far as it is
    let; `answered` are the calls that have heard of their end, or a part of their answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._stream = -1
        self._window, self._initial = 65535, 65535
        self._windows: dict[int, int] = {}
        self._unsent: dict[int, bytes] = {}
        self.sent: dict[int, int] = defaultdict(int)
        self.answered: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._send(_SETTINGS, 0, b"", start=_PREFACE)
        self._send(_WINDOW, 0, _ROOM)

    def call(self, path: str, token: str = "", *, claimed_bytes: int = MESSAGE_BYTES) -> int:
        """Begin a call; returns its number."""
        self._stream += 2
        fields = b"\x83\x86" + b"\x04" + _text(path) + b"\x01" + _text("localhost")
        fields += b"\x0f\x10" + _text("application/grpc")
        fields += b"\x00" + _text("te") + _text("trailers")
        if token:
            fields += b"\x0f\x08" + _text(f"Bearer {token}")
        self._send(_HEADERS, self._stream, fields, flags=_END_HEADERS)
        self._windows[self._stream] = self._initial
        prefix = struct.pack(">BI", 0, claimed_bytes)
        self._unsent[self._stream] = prefix + bytes(MESSAGE_BYTES - 1)
        self._proceed()
        return self._stream

    async def listen(self) -> None:
        """Follow the server's frames until the connection ends."""
        while True:
            head = await self._reader.readexactly(9)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:]) & 0x7FFFFFFF
            self._take(
                kind, flags, stream, await self._reader.readexactly(int.from_bytes(head[:3]))
            )
            await self._writer.drain()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._set(dict(struct.iter_unpack(">HI", body)))
        elif kind == _PING and not flags & _ACK:
            self._send(_PING, 0, body, flags=_ACK)
        elif kind == _WINDOW and not stream:
            self._window += int.from_bytes(body)
        elif kind == _WINDOW and stream in self._windows:
            self._windows[stream] += int.from_bytes(body)
        elif kind in (_HEADERS, _RESET):
            self._unsent.pop(stream, None)
            self.answered[stream].set()
        self._proceed()

    def _set(self, settings: dict[int, int]) -> None:
        grown = settings.get(_INITIAL_WINDOW, self._initial) - self._initial
        self._initial += grown
        self._windows = {stream: window + grown for stream, window in self._windows.items()}
        self._send(_SETTINGS, 0, b"", flags=_ACK)

    def _proceed(self) -> None:
        for stream, rest in list(self._unsent.items()):
            while size := min(len(rest), self._window, self._windows[stream], 2**14):
                if size < 0:
                    break
                self._send(_DATA, stream, rest[:size])
                rest = rest[size:]
                self._window -= size
                self._windows[stream] -= size
                self.sent[stream] += size
            self._unsent[stream] = rest

    def _send(
        self, kind: int, stream: int, body: bytes, *, flags: int = 0, start: bytes = b""
    ) -> None:
        head = len(body).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4)
        self._writer.write(start + head + body)


def _text(text: str) -> bytes:
    """Return a string in HPACK; it must have fewer than 127 bytes."""
    return bytes((len(text),)) + text.encode()


@asynccontextmanager
async def half_sent(address: str) -> AsyncGenerator[HalfSent]:
    """A connection while the block runs."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = HalfSent(reader, writer)
    listening = asyncio.create_task(connection.listen())
    try:
        yield connection
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        writer.close()
