"""Waits within a stream of limited age, after which its client reconnects."""

import asyncio
import time

from grpc import StatusCode

from flotilla_common.aio.concurrency import wait_for_event
from flotilla_launcher.control.launcher import refusal_error

# Longest life of a stream. The client reconnects, so neither side hangs for ever.
STREAM_AGE_S = 300.0
_FOLLOW_S = 0.2


async def wait_for_change(change: asyncio.Event, deadline: float) -> None:
    """Wait for a change. A stream past its age ends with UNAVAILABLE, and the client
    reconnects."""
    _check_age(deadline)
    await wait_for_event(change, max(0.0, deadline - time.monotonic()))


async def wait_to_poll(deadline: float) -> None:
    _check_age(deadline)
    await asyncio.sleep(_FOLLOW_S)


def _check_age(deadline: float) -> None:
    """Raise UNAVAILABLE, STREAM_AGE, past the deadline."""
    if time.monotonic() >= deadline:
        message = "this stream reached its maximum age; reconnect and continue where it ended"
        raise refusal_error(StatusCode.UNAVAILABLE, "STREAM_AGE", message)
