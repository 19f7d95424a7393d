"""MCP over HTTP: streamable HTTP, where each message is an exchange, and the older transport, where
all answers arrive on one stream."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from urllib.parse import urljoin, urlsplit

import aiohttp
from mcp_types import (
    METHOD_NOT_FOUND,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
)

from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.parsing import ParseError, TextLimits, parse_json, parse_json_aside
from flotilla_env_gateway.adapters.event_stream import Event, read_events
from flotilla_env_gateway.adapters.http_client import (
    DEFAULT_LIMITS,
    HttpError,
    exchange_json,
    open_answer,
    read_body,
)
from flotilla_env_gateway.adapters.mcp.transport import (
    INITIALIZED,
    Transport,
    parse_message,
    request_until,
)
from flotilla_env_gateway.ports import BackendError

_LOG = get_logger(__name__)
_ACCEPT = {"accept": "application/json, text/event-stream"}
_EVENTS = {"accept": "text/event-stream"}
_SESSION_ID, _LAST_EVENT_ID = "mcp-session-id", "last-event-id"
_RECONNECT_S, _CONNECT_S = 1.0, 30.0
# Statuses that may carry the server's own answer; others are of its session or of a proxy.
_MAY_ANSWER = {400, 422, 500}
# Statuses of a server that offers no stream of its own requests.
_NO_STREAM = {400, 404, 405, 406, 501}


class HttpTransport(Transport):
    """Streamable HTTP, to exactly `url`; `headers` go with every message, besides the pool's own.

    A server that keeps sessions may ask its client something outside of an exchange, on a stream
    of its own, which is kept open unless the server refuses it. `listening` is another pool
    than `http`, whose connections are limited; None: there is no such stream."""

    has_exchanges = True

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        limits: TextLimits = DEFAULT_LIMITS,
        listening: aiohttp.ClientSession | None = None,
        refusing: set[str] | None = None,
    ) -> None:
        super().__init__(limits)
        self.headers.update(headers or {})
        self._http = http
        self._url = url
        self._listening = listening
        self._refusing = set[str]() if refusing is None else refusing
        self._initialized = asyncio.Event()
        self._sent_aside: JSONRPCMessage | None = None
        # Exchanges whose answer may also arrive on the server's own stream, which then ends them.
        self._exchanges: dict[int | str, asyncio.Timeout] = {}

    async def run(self) -> None:
        await self._initialized.wait()
        if self._sent_aside is not None:
            request_until.set(loop_time() + _CONNECT_S)
            # Whatever it is refused for, the first request will be too.
            with suppress(BackendError):
                await self._exchange(self._sent_aside)
        place = Event(retry_s=_RECONNECT_S)
        while (http := self._stream_pool()) is not None:
            try:
                place = await self._listen(http, place)
            except HttpError as error:
                if error.status in _NO_STREAM:
                    self._refusing.add(self._url)
                if error.status < 500:
                    return
            except BackendError as error:
                _LOG.info("mcp_stream_ended", error=str(error))
            await asyncio.sleep(max(place.retry_s or 0.0, _RECONNECT_S))

    async def send_message(
        self, message: JSONRPCMessage, headers: Mapping[str, str] | None = None
    ) -> None:
        if getattr(message, "method", "") == INITIALIZED and _SESSION_ID not in self.headers:
            # Where nothing is kept of it, no request need wait until it has arrived.
            self._sent_aside = message
            self._initialized.set()
            return
        if not isinstance(message, JSONRPCRequest) or self._stream_pool() is None:
            await self._exchange(message, headers)
            return
        elsewhere = self._exchanges[message.id] = asyncio.timeout(None)
        try:
            async with elsewhere:
                await self._exchange(message, headers)
        except TimeoutError:
            if not elsewhere.expired():
                raise
        finally:
            del self._exchanges[message.id]

    def _stream_pool(self) -> aiohttp.ClientSession | None:
        """Return the pool for the server's own stream; None if there is no such stream."""
        offered = _SESSION_ID in self.headers and self._url not in self._refusing
        return self._listening if offered else None

    async def _exchange(
        self, message: JSONRPCMessage, own: Mapping[str, str] | None = None
    ) -> None:
        body = message.model_dump(by_alias=True, mode="json", exclude_unset=True)
        headers = {**_ACCEPT, **self.headers, **(own or {})}
        exchange = _open_until_cancelled(self._http, "POST", self._url, headers, body)
        try:
            async with exchange as answer:
                if isinstance(message, JSONRPCRequest):
                    await self._receive_answer(answer, message)
        except HttpError as error:
            if not isinstance(message, JSONRPCRequest):
                raise
            if not await self._is_answer(error, message, sessions=not own):
                raise _hint_at_older(error, message) from error
        if getattr(message, "method", "") == INITIALIZED:
            self._initialized.set()

    async def close(self, timeout_s: float) -> None:
        """End the session at the server, if it has an id. Raises BackendError."""
        if _SESSION_ID not in self.headers:
            return
        headers = {**_ACCEPT, **self.headers}
        try:
            await exchange_json(
                self._http, "DELETE", self._url, timeout_s=timeout_s, headers=headers
            )
        except HttpError as error:
            # Servers may refuse to end sessions (405), or have forgotten it or its key already.
            if error.status >= 500:
                raise

    async def _receive_answer(
        self, answer: aiohttp.ClientResponse, request: JSONRPCRequest
    ) -> None:
        if request.method == "initialize" and (session_id := answer.headers.get(_SESSION_ID)):
            self.headers[_SESSION_ID] = session_id
        if answer.content_type != "text/event-stream":
            content = await read_body(answer, self.limits.bytes)
            found = parse_message(await parse_json_aside(content, self.limits))
            if isinstance(found, JSONRPCError) and found.id is None:
                # Of a request whose id the server could not read: it can only be this one.
                found.id = request.id
            if found is None or not _answers(found, request):
                message = f"{request.method} was answered by no message of its own"
                raise BackendError("protocol", message, delivered=None)
            await self.receive_message(found)
            return
        place = await self._receive_events(answer, Event(), request)
        while place is not None:
            if place.event_id is None:
                raise BackendError(
                    "stream_cut", "the stream ended without an answer", delivered=None
                )
            place = await self._resume(place, request)

    async def _resume(self, place: Event, request: JSONRPCRequest) -> Event | None:
        """Ask for the rest of a stream that its server ended before the answer."""
        await asyncio.sleep(_RECONNECT_S if place.retry_s is None else place.retry_s)
        headers = {**_EVENTS, **self.headers, _LAST_EVENT_ID: place.event_id or ""}
        try:
            async with _open_until_cancelled(self._http, "GET", self._url, headers) as answer:
                return await self._receive_events(answer, place, request)
        except BackendError as error:
            # Whatever the status says of this request: the first one has been executed.
            error.delivered = None
            raise

    async def _receive_events(
        self, answer: aiohttp.ClientResponse, place: Event, request: JSONRPCRequest | None
    ) -> Event | None:
        """Receive the messages of a stream up to the answer to `request`; return None then, or the
        place where the stream ended before it."""
        last = Event(event_id=place.event_id, retry_s=place.retry_s)
        async for event in read_events(answer, self.limits.bytes):
            last.event_id = last.event_id if event.event_id is None else event.event_id
            last.retry_s = last.retry_s if event.retry_s is None else event.retry_s
            if event.kind != "message" or not event.text:
                continue
            message = await self.receive_text(event.text)
            if _answers(message, request):
                return None
            self._end_exchange(message)
        return last

    def _end_exchange(self, message: JSONRPCMessage | None) -> None:
        """End the exchange of a request that was answered on another stream."""
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            exchange = self._exchanges.get(message.id)
            if exchange is not None:
                exchange.reschedule(loop_time())

    async def _listen(self, http: aiohttp.ClientSession, place: Event) -> Event:
        headers = {**_EVENTS, **self.headers}
        if place.event_id is not None:
            headers[_LAST_EVENT_ID] = place.event_id
        request_until.set(loop_time() + _CONNECT_S)
        async with _open_until_cancelled(http, "GET", self._url, headers) as answer:
            if answer.content_type != "text/event-stream":
                raise HttpError(405, "no stream of events", None)
            return await self._receive_events(answer, place, None) or place

    async def _is_answer(
        self, error: HttpError, request: JSONRPCRequest, *, sessions: bool
    ) -> bool:
        """Receive an error of JSON-RPC that names this request, sent with a status of failure. To
        the question whether the session is known, it is an answer only if there is no such method.
        """
        # Where there are no sessions, it is a method that was not found.
        if error.status not in _MAY_ANSWER and (sessions or error.status != 404):
            return False
        with suppress(ParseError, BackendError):
            found = parse_message(parse_json(error.body, self.limits))
            if found is not None and _answers(found, request) and not _denies_ping(found, request):
                await self.receive_message(found)
                return True
        return False


def _denies_ping(found: JSONRPCMessage, request: JSONRPCRequest) -> bool:
    is_error = isinstance(found, JSONRPCError) and found.error.code != METHOD_NOT_FOUND
    return request.method == "ping" and is_error


class SseTransport(Transport):
    """The HTTP+SSE transport of MCP before 2025: the server names on its stream where messages are
    to be sent, and answers them there. The session ends with the stream."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        listening: aiohttp.ClientSession,
        url: str,
        *,
        limits: TextLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(limits)
        self._http = http
        self._listening = listening
        self._url = url
        self._endpoint: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        failure = BackendError("connection", "its stream ended", delivered=False)
        try:
            headers = {**_EVENTS, **self.headers}
            request_until.set(loop_time() + _CONNECT_S)
            async with _open_until_cancelled(self._listening, "GET", self._url, headers) as answer:
                async for event in read_events(answer, self.limits.bytes):
                    await self._receive_event(event)
        except BackendError as error:
            failure = error
        finally:
            if not self._endpoint.done():
                self._endpoint.set_exception(failure)
                self._endpoint.exception()  # If nobody retrieves it, asyncio logs it.
            self.end_reception(str(failure))

    async def send_message(
        self, message: JSONRPCMessage, headers: Mapping[str, str] | None = None
    ) -> None:
        body = message.model_dump(by_alias=True, mode="json", exclude_unset=True)
        endpoint = await asyncio.shield(self._endpoint)
        async with _open_until_cancelled(self._http, "POST", endpoint, self.headers, body):
            return

    async def _receive_event(self, event: Event) -> None:
        if event.kind == "endpoint" and not self._endpoint.done():
            endpoint = urljoin(self._url, event.text.decode("utf-8", "replace"))
            if urlsplit(endpoint)[:2] != urlsplit(self._url)[:2]:
                message = f"its endpoint {endpoint[:200]!r} is of another origin"
                raise BackendError("redirect", message, delivered=False, invalid=True)
            self._endpoint.set_result(endpoint)
        elif event.kind == "message" and event.text:
            await self.receive_text(event.text)


def _open_until_cancelled(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: object = None,
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Open an answer that is read until its caller cancels, who then tells the server; only the
    connection must be made within the request's time."""
    left_s = seconds_left(request_until.get())
    return open_answer(
        http, method, url, timeout_s=left_s, connect_only=True, headers=headers, body=body
    )


def _hint_at_older(error: HttpError, request: JSONRPCRequest) -> HttpError:
    """Add to a refusal of the first message what a server of the older transport needs."""
    if request.method != "initialize" or error.status not in (404, 405):
        return error
    hint = f'{error.body[:200]}; for a server of the older HTTP+SSE, set transport = "sse"'
    return HttpError(error.status, hint, error.retry_after_s)


def _answers(message: JSONRPCMessage | None, request: JSONRPCRequest | None) -> bool:
    return (
        request is not None
        and isinstance(message, JSONRPCResponse | JSONRPCError)
        and str(message.id) == str(request.id)
    )
