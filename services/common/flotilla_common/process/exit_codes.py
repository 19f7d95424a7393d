"""Exit codes of a service process, and the errors that lead to them."""

import grpc
import grpc.aio

from flotilla_common.rpc.errors import ServiceError

OK, FAILED, CONFIG, RETRYABLE = 0, 1, 2, 3
_RETRYABLE_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}


def exit_code_of(error: Exception) -> int:
    """Return RETRYABLE for an error that may be transient, else FAILED."""
    return RETRYABLE if _may_pass(error) else FAILED


def _may_pass(error: Exception) -> bool:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in _RETRYABLE_CODES
    if isinstance(error, ServiceError):
        return error.code in _RETRYABLE_CODES
    return isinstance(error, ConnectionError | TimeoutError)
