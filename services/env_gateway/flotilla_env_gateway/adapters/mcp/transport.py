"""The two streams of messages over which the official SDK speaks MCP."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Self

import anyio
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import (
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.text.parsing import TextLimits, as_object, parse_json_aside
from flotilla_env_gateway.ports import BackendError

# Characters shown of a malformed message.
_SHOWN = 200
INITIALIZED = "notifications/initialized"
CANCELLED = "notifications/cancelled"
# Seconds for a message that nobody waits for, such as the answer to a server's request.
ASIDE_S = 0.1
# Messages received before the session has taken one, and requests of one server to its client.
_WAITING, _MAX_ASKED = 64, 10_000

# End of the current request's time, on the loop's clock: transports send in the caller's task.
request_until: ContextVar[float] = ContextVar("request_until")


class Transport(ABC):
    """The way to one server. It is itself the stream that the session writes to; `received` is the
    one that it reads from.

    A request is sent in the task of its caller, who therefore gets a failure as the BackendError
    that it is, and not as an error of JSON-RPC, which only a server can answer."""

    # The reason why the server is gone; "" while it may be there.
    ended = ""
    # True if each request is an exchange of its own: from 2026-07-28 on its end cancels it.
    has_exchanges = False

    def __init__(self, limits: TextLimits) -> None:
        self.limits = limits
        self._received, self.received = anyio.create_memory_object_stream[
            SessionMessage | Exception
        ](_WAITING)
        # Headers that the session wants with every message from now on.
        self.headers: dict[str, str] = {}
        self._asked = 0

    @abstractmethod
    async def run(self) -> None:
        """Receive what arrives outside of exchanges, until cancelled or the server is gone."""

    @abstractmethod
    async def send_message(
        self, message: JSONRPCMessage, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a message, with headers of its own; deliver the answer to a request, at the latest
        by `request_until`, or raise BackendError."""

    async def send(self, item: SessionMessage, /) -> None:
        """Send a message of the session. Raises BackendError if somebody waits for it."""
        message = item.message
        given = item.metadata.headers if isinstance(item.metadata, ClientMessageMetadata) else None
        match message:
            case JSONRPCNotification(method=method) if method == CANCELLED:
                await self._send_aside(message)
            case JSONRPCNotification():
                # The one that ends the handshake names what was agreed on.
                self.headers.update(given or {})
                await self.send_message(message)
            case JSONRPCRequest():
                await self.send_message(message, given)
            case JSONRPCResponse() | JSONRPCError():
                await self._send_aside(message)

    async def receive_text(self, text: bytes) -> JSONRPCMessage | None:
        """Pass a message on to the session; return it, or None if the text is none.

        Raises ParseError, and BackendError for a server that asks without end."""
        message = parse_message(await parse_json_aside(text, self.limits))
        if message is not None:
            await self.receive_message(message)
        return message

    async def receive_message(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCRequest):
            self._asked += 1
            if self._asked > _MAX_ASKED:
                why = f"the server asked its client {_MAX_ASKED} times"
                raise BackendError("protocol", why, delivered=None)
        received = SessionMessage(message)
        try:
            # Unlike `send`, without a turn of the loop.
            self._received.send_nowait(received)
        except anyio.WouldBlock:
            await self._received.send(received)

    def end_reception(self, why: str) -> None:
        """Let the session know that nothing more arrives: requests in progress fail."""
        self.ended = self.ended or why
        self._received.close()

    async def close(self, timeout_s: float) -> None:
        """End the session at the server, where that needs a message. Raises BackendError."""
        return

    async def aclose(self) -> None:
        self.end_reception("it was closed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _send_aside(self, message: JSONRPCMessage) -> None:
        """Send what may get lost, within a short time."""
        token = request_until.set(loop_time() + ASIDE_S)
        try:
            with anyio.move_on_after(ASIDE_S):
                await self.send_message(message)
        except BackendError:
            pass
        finally:
            request_until.reset(token)


def parse_message(value: object) -> JSONRPCMessage | None:
    """Return a JSON value as a message of JSON-RPC; None for one that is none, such as a line that
    a server logs to its standard output. Raises BackendError for a malformed one."""
    fields = {"jsonrpc": "2.0", **as_object(value)}
    if "method" not in fields and not fields.keys() & {"result", "error"}:
        return None
    try:
        return jsonrpc_message_adapter.validate_python(fields, by_name=False)
    except ValidationError as error:
        message = f"no message of JSON-RPC: {json.dumps(value)[:_SHOWN]}"
        raise BackendError("protocol", message, delivered=None) from error
