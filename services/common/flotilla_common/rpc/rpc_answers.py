"""The end of an answered call: counting it, and turning an error into a status."""

from __future__ import annotations  # gRPC's generic classes are so only for type checkers

import secrets
import time
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.any import pack
from google.protobuf.duration import from_nanoseconds
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from flotilla_common.rpc.errors import ServiceError, make_refusal
from flotilla_common.telemetry.log import get_logger

Context = grpc.aio.ServicerContext[Any, Any]
_Code = grpc.StatusCode
_PUSHBACK_HEADER = "grpc-retry-pushback-ms"
_log = get_logger(__name__)


class Answer:
    """Context of one call: it counts the call, and turns an exception into a status."""

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
            await self._end_with_error(error)

    async def _end_with_error(self, error: BaseException) -> None:
        if isinstance(error, ServiceError):
            await abort(self._context, error)
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return  # gRPC handles it
        if isinstance(error, NotImplementedError):
            message = f"{self._method} is not implemented"
            await abort(self._context, make_refusal(_Code.UNIMPLEMENTED, "UNIMPLEMENTED", message))
        # The text of an unexpected error may hold secrets: it goes to the log, not to the caller.
        error_id = secrets.token_hex(6)
        _log.error("a handler failed", method=self._method, error_id=error_id, exc_info=error)
        message = f"internal error {error_id}; see the service's log"
        await abort(self._context, make_refusal(_Code.INTERNAL, "INTERNAL", message))


async def abort(context: Context, error: ServiceError) -> NoReturn:
    """End the call with `error`, keeping reason, metadata and retry delay machine-readable."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=error.domain, metadata=error.metadata
    )
    details = [pack(info)]
    pushback: tuple[tuple[str, str], ...] = ()
    if error.retry_delay_s is not None:
        delay = from_nanoseconds(int(error.retry_delay_s * 1e9))
        details.append(pack(error_details_pb2.RetryInfo(retry_delay=delay)))
        pushback = ((_PUSHBACK_HEADER, str(int(error.retry_delay_s * 1000))),)
    # Outside text may contain lone surrogates, which no message can hold.
    message = error.message.encode("utf-8", "replace").decode()
    status = status_pb2.Status(code=error.code.value[0], message=message, details=details)
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, (*rich.trailing_metadata, *pushback))


def _code_set(context: Context) -> str:
    """Return the status that a handler set instead of raising."""
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
