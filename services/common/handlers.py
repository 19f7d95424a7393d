"""What every answered call goes through: token, parsing, trace, metrics, errors.

One interceptor does all of it, and wraps each method once: a stack of five costs five times as
much.
"""

from __future__ import annotations  # gRPC's generic classes are so only for type checkers

import inspect
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager, aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import trace
from services.common.auth import DOMAIN, Authenticator
from services.common.errors import ServiceError
from services.common.log import get_logger
from services.common.metrics import rpc_observer

Context = grpc.aio.ServicerContext[Any, Any]
_Code = grpc.StatusCode
_PUSHBACK_HEADER = "grpc-retry-pushback-ms"
_log = get_logger(__name__)


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler; methods in `unauthenticated` need no token."""

    def __init__(self, authenticator: Authenticator, unauthenticated: Collection[str]) -> None:
        self._authenticator = authenticator
        self._unauthenticated = frozenset(unauthenticated)
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # gRPC answers UNIMPLEMENTED
                return None
            needs_token = method not in self._unauthenticated
            call = _Call(method, handler, self._authenticator if needs_token else None)
            wrapped = self._wrapped[method] = call.handler()
        return wrapped


class _Call:
    """The wrapped form of one method."""

    def __init__(
        self,
        method: str,
        handler: grpc.RpcMethodHandler[Any, Any],
        authenticator: Authenticator | None,
    ) -> None:
        self._method = method
        self._inner: Any = handler
        self._authenticator = authenticator
        self._observe = rpc_observer(method)

    def handler(self) -> grpc.RpcMethodHandler[Any, Any]:
        inner = self._inner
        streams = (bool(inner.request_streaming), bool(inner.response_streaming))
        make, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, self._unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, self._stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, self._unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, self._stream),
        }[streams]
        # Without a deserializer gRPC hands over the bytes: malformed ones are then our answer to
        # give, and nobody parses the bytes of a caller without a token.
        return make(behaviour, None, inner.response_serializer)

    async def _unary(self, raw: Any, context: Context) -> Any:
        inner = self._inner
        behaviour = inner.stream_unary if inner.request_streaming else inner.unary_unary
        async with _Answer(self._method, self._observe, context):
            with self._admitted(context):
                return await _awaited(behaviour(self._request(raw), context))

    async def _stream(self, raw: Any, context: Context) -> AsyncGenerator[Any]:
        inner = self._inner
        behaviour = inner.stream_stream if inner.request_streaming else inner.unary_stream
        async with _Answer(self._method, self._observe, context):
            with self._admitted(context):
                result = behaviour(self._request(raw), context)
                if not inspect.isasyncgen(result):  # a coroutine that calls context.write()
                    await _awaited(result)
                    return
                async with aclosing(result):
                    async for response in result:
                        yield response

    def _admitted(self, context: Context) -> AbstractContextManager[object]:
        """Refuse a wrong token, take up the caller's trace, and open a span where wanted."""
        metadata: Any = context.invocation_metadata() or ()
        if self._authenticator is not None:
            self._authenticator.check(metadata)
        for key, value in metadata:
            if key == trace.HEADER:
                trace.continue_from(str(value))
        return trace.span(self._method)

    def _request(self, raw: Any) -> Any:
        return self._parsed(raw) if self._inner.request_streaming else self._parse(raw)

    async def _parsed(self, raw: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for message in raw:
            yield self._parse(message)

    def _parse(self, raw: bytes) -> Any:
        try:
            return self._inner.request_deserializer(raw)
        except Exception as error:
            # What a parser raises differs between protobuf's implementations.
            raise ServiceError(
                _Code.INVALID_ARGUMENT,
                "MALFORMED_MESSAGE",
                f"{len(raw)} bytes are not a request of {self._method}",
                domain=DOMAIN,
            ) from error


class _Answer:
    """Around one call: counts it, and turns what it raises into a status."""

    __slots__ = ("_context", "_method", "_observe", "_started")

    def __init__(
        self, method: str, observe: Callable[[str, float], None], context: Context
    ) -> None:
        self._method = method
        self._observe = observe
        self._context = context

    async def __aenter__(self) -> None:
        self._started = time.perf_counter()

    async def __aexit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: object
    ) -> None:
        code = _code_set(self._context) if error is None else _code_of(error, self._context)
        self._observe(code, time.perf_counter() - self._started)
        if error is not None:
            await self._fail(error)

    async def _fail(self, error: BaseException) -> None:
        if isinstance(error, ServiceError):
            await abort(self._context, error)
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return  # goes its own way
        if isinstance(error, NotImplementedError):
            message = f"{self._method} is not implemented"
            await abort(self._context, _refusal(_Code.UNIMPLEMENTED, "UNIMPLEMENTED", message))
        # The text of an unexpected error may hold secrets: it is for the log, not for the caller.
        error_id = secrets.token_hex(6)
        _log.error("a handler failed", method=self._method, error_id=error_id, exc_info=error)
        message = f"internal error {error_id}; the service's log says more"
        await abort(self._context, _refusal(_Code.INTERNAL, "INTERNAL", message))


async def abort(context: Context, error: ServiceError) -> NoReturn:
    """End the call with `error`, keeping reason, metadata and retry delay machine-readable."""
    details = [
        _packed(
            error_details_pb2.ErrorInfo(
                reason=error.reason, domain=error.domain, metadata=error.metadata
            )
        )
    ]
    pushback: tuple[tuple[str, str], ...] = ()
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        pushback = ((_PUSHBACK_HEADER, str(int(error.retry_delay_s * 1000))),)
    # Others' words may hold lone surrogates, which no message can.
    message = error.message.encode("utf-8", "replace").decode()
    status = status_pb2.Status(code=error.code.value[0], message=message, details=details)
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, (*rich.trailing_metadata, *pushback))


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _refusal(code: grpc.StatusCode, reason: str, message: str) -> ServiceError:
    return ServiceError(code, reason, message, domain=DOMAIN)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _code_set(context: Context) -> str:
    """The status that a handler set instead of raising."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return "OK" if not code else _NAMES.get(code, "UNKNOWN")


def _code_of(error: BaseException, context: Context) -> str:
    if isinstance(error, ServiceError):
        return error.code.name
    if isinstance(error, grpc.aio.AbortError):
        return _code_set(context)
    if isinstance(error, NotImplementedError):
        return grpc.StatusCode.UNIMPLEMENTED.name
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"


_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
