"""OpenEnv's WebSocket protocol, versions 0.3 to 0.10: one socket is one session of an environment,
and carries one request at a time.

Answers have no number. After a request that timed out, the next message on its socket could answer
either request: the socket is dropped, and the session with it."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import aiohttp

from flotilla_common.text.parsing import TextLimits, TooLargeError, as_object, parse_json_aside
from flotilla_env_gateway.large_values import dump_json_aside
from flotilla_env_gateway.ports import BackendError

_KEYS = "backends.openenv.max_answer_bytes and max_answer_values"
_CLOSE_S = 2.0
_WAIT_FOR_CAPACITY_S = 0.5


class OpenEnvError(BackendError):
    """An error message of the server, with OpenEnv's code."""

    def __init__(self, code: str, message: str) -> None:
        kinds = {"CAPACITY_REACHED": "throttled", "VALIDATION_ERROR": "bad_request"}
        super().__init__(
            kinds.get(code, code.lower() or "openenv"),
            message[:2000],
            delivered=False if code in _NOT_EXECUTED else None,
            retry_after_s=_WAIT_FOR_CAPACITY_S if code == "CAPACITY_REACHED" else None,
            lost=code == "SESSION_ERROR",
            invalid=code in ("VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE"),
        )
        self.code = code
        self.message = message


_NOT_EXECUTED = frozenset(
    {"CAPACITY_REACHED", "FACTORY_ERROR", "VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE"}
)


class OpenEnvChannel:
    """One open socket. Messages are read as they come, so that the server's pings are answered and
    the end of the session is noticed before the next request."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, limits: TextLimits) -> None:
        self.socket = socket
        self._limits = limits
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._ended: BackendError | None = None
        self._reader = asyncio.create_task(self._read_messages())
        self._closing: asyncio.Task[bool] | None = None

    @property
    def is_open(self) -> bool:
        return self._ended is None

    async def send_request(self, kind: str, data: Any, *, timeout_s: float) -> dict[str, Any]:
        """Send a request and return the data of its answer. Raises OpenEnvError if the answer is an
        error, and BackendError."""
        if self._answer is not None:
            raise BackendError("busy", "a request is in flight already", delivered=False)
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send_message(
                    {"type": kind} if data is None else {"type": kind, "data": data}
                )
                return await self._answer
        except TimeoutError:
            self.drop_session(f"its request was not answered in {timeout_s:.1f} s")
            message = f"no answer in {timeout_s:.1f} s"
            raise BackendError("timeout", message, delivered=None) from None
        except asyncio.CancelledError:
            self.drop_session("its request was given up")
            raise
        finally:
            self._answer = None

    def drop_session(self, why: str) -> None:
        """End the session without a closing message."""
        self._end_session(why)
        self._reader.cancel()

    async def close(self, *, timeout_s: float) -> None:
        """End the session, and return when the server has freed its place, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._close_gracefully()
        self.drop_session("it was closed")

    async def _close_gracefully(self) -> None:
        if self.is_open:
            with suppress(ConnectionError):
                await self.socket.send_str('{"type": "close"}')
                await asyncio.wait({self._reader})
        self.drop_session("it was closed")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _send_message(self, message: Mapping[str, Any]) -> None:
        try:
            text = await dump_json_aside(message)
            await self.socket.send_frame(text, aiohttp.WSMsgType.TEXT)
        except ConnectionError:
            # Messages sent before the server closed the socket are still to be read.
            await asyncio.wait({self._reader})
            if self._answer is not None and self._answer.done():
                self._answer.exception()
            assert self._ended is not None, "the reader ends with the session"
            raise self._ended.with_traceback(None) from None

    async def _read_messages(self) -> None:
        async for message in self.socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            try:
                self._take_message(await parse_json_aside(cast("str", message.data), self._limits))
            except TooLargeError as error:
                self._end_session(f"a message is too large: {error} ({_KEYS})", "too_large")
                return
            except (ValueError, TypeError) as error:
                self._end_session(f"a message is not of the protocol: {error}"[:500])
                return
        error = self.socket.exception()
        code = self.socket.close_code
        if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            self._end_session(
                f"a message exceeds {self._limits.bytes} bytes ({_KEYS})", "too_large"
            )
        else:
            self._end_session(f"the connection closed ({error or code})")

    def _take_message(self, message: object) -> None:
        kind, data = _parse_message(message)
        waiting = self._answer
        if kind == "error":
            refusal = OpenEnvError(str(data.get("code") or ""), _error_text(data))
            if waiting is None or waiting.done():
                # Such as CAPACITY_REACHED, which comes before any request.
                self._ended = self._ended or refusal
            else:
                waiting.set_exception(refusal)
        elif waiting is None or waiting.done():
            raise ValueError(f"{kind!r} does not answer a request")
        else:
            waiting.set_result(data)

    def _end_session(self, why: str, kind: str = "lost") -> None:
        message = f"the session has ended: {why}"
        self._ended = self._ended or BackendError(kind, message, delivered=False, lost=True)
        if self._closing is None:
            self._closing = asyncio.create_task(self.socket.close())
        waiting = self._answer
        if waiting is not None and not waiting.done():
            waiting.set_exception(BackendError(kind, message, delivered=None, lost=True))


async def open_channel(
    http: aiohttp.ClientSession,
    url: str,
    *,
    timeout_s: float,
    ping_interval_s: float,
    limits: TextLimits,
) -> OpenEnvChannel:
    """Open a session. Raises BackendError."""
    try:
        async with asyncio.timeout(timeout_s):
            socket = await http.ws_connect(
                f"{url}/ws",
                heartbeat=ping_interval_s,
                max_msg_size=limits.bytes,
                # A dataclass by aiohttp's own decorator, which the type checker cannot follow.
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),  # pyright: ignore[reportCallIssue]
            )
    except TimeoutError:
        message = f"{url} did not open a session in {timeout_s:.1f} s"
        raise BackendError("timeout", message, delivered=False) from None
    except aiohttp.WSServerHandshakeError as error:
        hint = "; check backends.openenv.api_key_env" if error.status in (401, 403) else ""
        message = f"{url}/ws answered HTTP {error.status} instead of opening a session{hint}"
        invalid = error.status in (400, 401, 403, 404, 405)
        raise BackendError("handshake", message, delivered=False, invalid=invalid) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise BackendError("connect", f"{url}: {error}", delivered=False) from error
    return OpenEnvChannel(socket, limits)


def _parse_message(message: object) -> tuple[str, dict[str, Any]]:
    """Parse a message into (type, data). Raises TypeError."""
    fields = as_object(message)
    kind, data = fields.get("type"), fields.get("data") or {}
    if not isinstance(kind, str):
        raise TypeError("it has no type")
    if not isinstance(data, dict):
        raise TypeError(f"the data of {kind[:100]!r} is no object")
    return kind, cast("dict[str, Any]", data)


def _error_text(data: Mapping[str, Any]) -> str:
    """Format the server's message; pydantic's errors in short form, which a policy can act on."""
    problems = data.get("errors")
    if not isinstance(problems, list):
        return str(data.get("message") or "no message")
    found = [cast("Mapping[str, Any]", item) for item in problems if isinstance(item, dict)]
    return "; ".join(
        f"{_error_location(item)}: {item.get('msg', 'is not valid')}" for item in found
    )


def _error_location(problem: Mapping[str, Any]) -> str:
    place = problem.get("loc")
    parts = cast("list[object]", place) if isinstance(place, list) else []
    return ".".join(map(str, parts)) or "arguments"
