"""What a peer's gRPC errors mean to the front door."""

from collections.abc import Generator
from contextlib import contextmanager

import grpc.aio

from flotilla_common.rpc.rpc import describe_error, service_error
from flotilla_tinker.ports import OrderRefused, OutOfOrder, Unavailable, Unknown

_UNKNOWN = ("MODEL_UNKNOWN", "SAMPLER_UNKNOWN")
# Reasons of both contracts that a client's order causes, and that come again with it.
_REFUSED = (
    *("MODEL_EXISTS", "BAD_SETTINGS", "BAD_BATCH", "UNKNOWN_LOSS", "STATE_MISMATCH", "NO_STATE"),
    *("TOO_MANY_MODELS", "NOT_FINITE"),
    *("SAMPLER_EXISTS", "NO_WEIGHTS", "BAD_REQUEST", "TOO_LONG", "TOO_MANY_SAMPLERS"),
)


@contextmanager
def peer_errors() -> Generator[None]:
    """Raise the errors of the ports in the place of gRPC's: what no contract names, such as a lost
    connection or a deadline, is Unavailable."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        refusal = service_error(error)
        reason = refusal.reason if refusal else ""
        message = refusal.message if refusal else ""
        if reason in _UNKNOWN:
            raise Unknown(message) from error
        if reason == "OUT_OF_ORDER":
            raise OutOfOrder(message) from error
        if reason in _REFUSED:
            raise OrderRefused(message) from error
        raise Unavailable(describe_error(error)) from error
