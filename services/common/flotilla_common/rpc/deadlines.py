"""The event loop's clock, and the time left on it."""

import asyncio

# Shortest timeout of a call: asyncio and aiohttp read 0 as no limit, or end it before it begins.
_LEAST_S = 0.001


def loop_time() -> float:
    """Return monotonic seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()


def seconds_left(until: float) -> float:
    """Return the time until `until` on the loop's clock, which is always above 0."""
    return max(_LEAST_S, until - loop_time())
