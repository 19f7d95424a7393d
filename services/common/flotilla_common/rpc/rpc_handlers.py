"""Steps of every answered call: token, parsing, trace, metrics, errors.

One interceptor does all of it, and wraps each method once: a stack of five costs five times as
much. Every call is registered as a stream of requests, so that gRPC reads only on demand: nothing
is read from a caller without the token, and no message is awaited for ever."""

from __future__ import annotations  # gRPC's generic classes are so only for type checkers

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
)
from contextlib import AbstractContextManager, aclosing
from functools import cache
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from flotilla_common.rpc.auth import Authenticator
from flotilla_common.rpc.errors import ServiceError, make_refusal
from flotilla_common.rpc.first_message_deadline import FirstMessages
from flotilla_common.rpc.rpc_answers import Answer, Context
from flotilla_common.telemetry import trace
from flotilla_common.telemetry.metrics import rpc_observer

_Code = grpc.StatusCode
# Ids are kept, logged and quoted.
_MOST_ID_CHARACTERS = 200
# A service has more watchers than replicas of any one peer.
MOST_STREAMS = 512


class Interceptor(grpc.aio.ServerInterceptor):
    """Wrapper of every handler; methods in `unauthenticated` need no token.

    A method that streams its answer runs at most `most_streams` times at once, by default
    MOST_STREAMS."""

    def __init__(
        self,
        authenticator: Authenticator,
        unauthenticated: Collection[str],
        most_streams: Mapping[str, int],
    ) -> None:
        self._authenticator = authenticator
        self._unauthenticated = frozenset(unauthenticated)
        self._most_streams = most_streams
        self._first_messages = FirstMessages()
        self._calls: dict[str, _Call] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        call = self._calls.get(method)
        if call is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # gRPC answers UNIMPLEMENTED
                return None
            most = self._most_streams.get(method, MOST_STREAMS)
            call = self._calls[method] = _Call(method, handler, self._first_messages, most)
        if method not in self._unauthenticated:
            metadata: Any = handler_call_details.invocation_metadata or ()
            try:
                self._authenticator.check(metadata)
            except ServiceError as refusal:
                return call.make_refusing_handler(refusal)
        return call.handler


class _Call:
    """The wrapped form of one method."""

    def __init__(
        self,
        method: str,
        handler: grpc.RpcMethodHandler[Any, Any],
        first_messages: FirstMessages,
        most_streams: int,
    ) -> None:
        self._method = method
        self._inner: Any = handler
        self._first_messages = first_messages
        self._most_streams = most_streams
        self._streams = 0
        self._observe = rpc_observer(method)
        # Without a deserializer gRPC passes the raw bytes, so we answer for malformed ones.
        make = grpc.stream_unary_rpc_method_handler
        behaviour: Any = self._unary
        if handler.response_streaming:
            make, behaviour = grpc.stream_stream_rpc_method_handler, self._stream
        self.handler: grpc.RpcMethodHandler[Any, Any] = make(
            behaviour, None, self._inner.response_serializer
        )

    def make_refusing_handler(self, refusal: ServiceError) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that answers with `refusal` and reads nothing."""

        async def refuse(_raw: Any, context: Context) -> NoReturn:
            async with Answer(self._method, self._observe, context):
                raise refusal

        return grpc.stream_unary_rpc_method_handler(refuse)

    async def _unary(self, raw: Any, context: Context) -> Any:
        inner = self._inner
        behaviour = inner.stream_unary if inner.request_streaming else inner.unary_unary
        async with Answer(self._method, self._observe, context):
            with self._continue_trace(context):
                return await _awaited(behaviour(await self._read_request(raw), context))

    async def _stream(self, raw: Any, context: Context) -> AsyncGenerator[Any]:
        inner = self._inner
        behaviour = inner.stream_stream if inner.request_streaming else inner.unary_stream
        async with Answer(self._method, self._observe, context):
            self._count(context)
            with self._continue_trace(context):
                result = behaviour(await self._read_request(raw), context)
                if not inspect.isasyncgen(result):  # a coroutine that calls context.write()
                    await _awaited(result)
                    return
                async with aclosing(result):
                    async for response in result:
                        yield response

    def _count(self, context: Context) -> None:
        """Count a stream of answers until its call ends; refuse it beyond the limit."""
        if self._streams >= self._most_streams:
            message = f"{self._streams} calls of {self._method} are already running; retry later"
            raise make_refusal(_Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", message)
        self._streams += 1
        # Not in a `finally`: a call that is cancelled while it writes leaves a generator suspended.
        context.add_done_callback(self._uncount)  # pyright: ignore[reportArgumentType]

    def _uncount(self, context: object) -> None:
        self._streams -= 1

    def _continue_trace(self, context: Context) -> AbstractContextManager[object]:
        """Continue the caller's trace, and open a span if the method wants one."""
        metadata: Any = context.invocation_metadata() or ()
        for key, value in metadata:
            if key == trace.HEADER:
                trace.continue_from(str(value))
        return trace.span(self._method)

    async def _read_request(self, raw: AsyncIterator[bytes]) -> Any:
        if self._inner.request_streaming:
            return self._parse_stream(raw)
        message = await self._first_messages.read(raw)
        if message is None:
            raise make_refusal(
                _Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE", "a call without a message"
            )
        return self._parse(message)

    async def _parse_stream(self, raw: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        message = await self._first_messages.read(raw)
        if message is None:
            return
        yield self._parse(message)
        async for message in raw:
            yield self._parse(message)

    def _parse(self, raw: bytes) -> Any:
        try:
            request = self._inner.request_deserializer(raw)
        except Exception as error:
            # Protobuf's implementations raise different errors.
            message = f"cannot parse {len(raw)} bytes as a request of {self._method}"
            raise make_refusal(_Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE", message) from error
        # Probes of the network send plain bytes.
        if isinstance(request, Message):
            _check_ids(request)
        return request


def _check_ids(message: Message) -> None:
    """Refuse ids that are too long, in the message and in those within it."""
    for field in _list_fields_with_ids(message.DESCRIPTOR):
        value = getattr(message, field.name)
        for each in value if field.is_repeated else (value,):
            if isinstance(each, Message):
                _check_ids(each)
            elif len(each) > _MOST_ID_CHARACTERS:
                text = (
                    f"{field.name} has {len(each)} characters, and at most {_MOST_ID_CHARACTERS}"
                    " may be"
                )
                raise make_refusal(_Code.INVALID_ARGUMENT, "ID_TOO_LONG", text)


@cache
def _list_fields_with_ids(message: Descriptor) -> list[FieldDescriptor]:
    """Return the fields of a message that are ids, or messages with such fields."""
    return [field for field in message.fields if _has_ids(field, ())]


def _has_ids(field: FieldDescriptor, outer: tuple[Descriptor, ...]) -> bool:
    inner = field.message_type
    if inner is None:
        is_text = field.type == FieldDescriptor.TYPE_STRING
        return is_text and field.name.endswith(("_id", "_ids"))
    if inner.GetOptions().map_entry or inner in outer:
        return False
    return any(_has_ids(each, (*outer, inner)) for each in inner.fields)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
