"""Calls that survive a peer's restart: all of our rpcs may be repeated."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from flotilla_common.rpc.rpc import service_error

T = TypeVar("T")

# The peer is away, going away, or full. INTERNAL and UNKNOWN are here because a connection that
# drops while a stream is written ends with them, and hides that the peer went away.
TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


async def call_with_retries(call: Callable[[float], Awaitable[T]], budget_s: float) -> T:
    """Call `call(remaining seconds)`, with retries at growing pauses while the peer is away.

    Raises the last AioRpcError if it is not transient or the budget is used up."""
    end = time.monotonic() + budget_s
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await call(max(end - time.monotonic(), 0.0))
        except grpc.aio.AioRpcError as error:
            wait = _choose_pause(error, pause)
            if error.code() not in TRANSIENT or time.monotonic() + wait >= end:
                raise
        await asyncio.sleep(wait)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _choose_pause(error: grpc.aio.AioRpcError, pause: float) -> float:
    """Return the pause that the peer requested, else a random part of `pause`, so that callers do
    not retry in step."""
    refused = service_error(error)
    server_delay_s = refused.retry_delay_s if refused else None
    return random.uniform(0.5, 1.0) * pause if server_delay_s is None else server_delay_s
