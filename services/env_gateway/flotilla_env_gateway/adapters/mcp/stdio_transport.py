"""MCP over the standard input and output of a process."""

import asyncio
import re
from collections.abc import Mapping
from typing import Protocol

from mcp_types import (
    INTERNAL_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
)

from flotilla_common.text.parsing import ParseError, TextLimits, TooLargeError, run_aside
from flotilla_env_gateway.adapters.event_stream import LINES_AT_ONCE
from flotilla_env_gateway.adapters.http_client import DEFAULT_LIMITS, too_large_error
from flotilla_env_gateway.adapters.mcp.transport import Transport
from flotilla_env_gateway.large_values import dump_line_aside
from flotilla_env_gateway.ports import BackendError

_CHUNK_BYTES = 2**16
# Where the id of an answer is looked for that is too large to be parsed: first or last in it.
_EDGE_BYTES = 256
_ID = re.compile(rb'"id"\s*:\s*"?(\d+)')


class ServerProcess(Protocol):
    """A running server, whose standard error is read by somebody else."""

    @property
    def stdin(self) -> asyncio.StreamWriter: ...

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    async def describe_end(self) -> str:
        """Return how the process ended."""
        ...


class StdioTransport(Transport):
    """Messages as lines, which servers may mix with other output. A message may also be printed
    over several lines. An answer that is too large fails its request only."""

    def __init__(self, process: ServerProcess, limits: TextLimits = DEFAULT_LIMITS) -> None:
        super().__init__(limits)
        self._process = process
        self._unanswered: set[int | str] = set()
        # Lines of a message that is not complete, and how many of its brackets are open.
        self._begun = bytearray()
        self._open_brackets = 0

    async def run(self) -> None:
        why = "its output is read no more"
        try:
            await self._read_lines()
            why = await self._process.describe_end()
        except BackendError as error:
            why = str(error)
        finally:
            self.end_reception(why)

    async def send_message(
        self, message: JSONRPCMessage, headers: Mapping[str, str] | None = None
    ) -> None:
        if isinstance(message, JSONRPCRequest):
            self._unanswered.add(message.id)
        body = message.model_dump(by_alias=True, mode="json", exclude_unset=True)
        try:
            self._process.stdin.write(await dump_line_aside(body))
            await self._process.stdin.drain()
        except ConnectionError:
            self.end_reception(await self._process.describe_end())

    async def receive_message(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._unanswered.discard(message.id)
        await super().receive_message(message)

    async def _read_lines(self) -> None:
        """Receive all lines. The work between two turns of the event loop is bounded, because a
        server may write empty lines for ever."""
        rest = _Line()
        while chunk := await self._process.stdout.read(_CHUNK_BYTES):
            *ends, last = chunk.split(b"\n")
            for number, end in enumerate(ends, 1):
                rest.append(end, self.limits.bytes)
                line, rest = rest, _Line()
                await self._receive_line(line)
                if number % LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            rest.append(last, self.limits.bytes)
        await self._receive_line(rest)

    async def _receive_line(self, line: "_Line") -> None:
        if line.dropped and not line.head.lstrip().startswith(b"{"):
            return
        if line.dropped:
            why = f"it has more than {self.limits.bytes} bytes"
            await self._fail_too_large(line.head + line.tail, TooLargeError(why))
            return
        text = b"".join(line.pieces).strip()
        if not text or not (self._begun or text.startswith(b"{")):
            return
        if self._begun and _is_whole(text):
            self._begun.clear()
        if self._begun or not text.endswith(b"}"):
            text = await self._continue_message(text)
        try:
            if text:
                await self.receive_text(text)
        except TooLargeError as error:
            await self._fail_too_large(text[:_EDGE_BYTES] + text[-_EDGE_BYTES:], error)
        except ParseError:
            return

    async def _continue_message(self, line: bytes) -> bytes:
        """Add a line to a message; return the message once the line completes it, else nothing."""
        if not self._begun:
            self._open_brackets = 0
        self._begun += line + b"\n"
        self._open_brackets += await run_aside(len(line), lambda: _count_open(line))
        if self._open_brackets > 0 and len(self._begun) <= self.limits.bytes:
            return b""
        text = bytes(self._begun)
        self._begun.clear()
        return text

    async def _fail_too_large(self, edges: bytes, error: TooLargeError) -> None:
        """Fail the request whose answer it is; if that cannot be told, all that it may be."""
        named = {int(found) for found in _ID.findall(edges)} & self._unanswered
        failure = too_large_error(error)
        for number in named or set(self._unanswered):
            data = ErrorData(code=INTERNAL_ERROR, message=str(failure), data=failure)
            await self.receive_message(JSONRPCError(jsonrpc="2.0", id=number, error=data))


class _Line:
    """A line as it arrives. Of one that is too large, only the edges are kept."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.head = self.tail = b""
        self.dropped = False

    def append(self, piece: bytes, max_bytes: int) -> None:
        self.size += len(piece)
        if self.size > max_bytes and not self.dropped:
            self.dropped = True
            self.head = b"".join(self.pieces)[:_EDGE_BYTES]
            self.pieces.clear()
        if self.dropped:
            self.tail = (self.tail + piece[-_EDGE_BYTES:])[-_EDGE_BYTES:]
        else:
            self.pieces.append(piece)


def _is_whole(line: bytes) -> bool:
    """Return whether a line is a whole message, whatever had begun before it."""
    return line.startswith(b"{") and line.endswith(b"}") and b'"jsonrpc"' in line


def _count_open(line: bytes) -> int:
    """Return how many brackets a line of JSON leaves open, less those that it closes."""
    plain = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = b"".join(plain.split(b'"')[::2])
    opened = structure.count(b"{") + structure.count(b"[")
    return opened - structure.count(b"}") - structure.count(b"]")
