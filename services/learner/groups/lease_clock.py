"""Clock of the lease book, on which all of its times are."""

import asyncio


def loop_time() -> float:
    """Return monotonic seconds."""
    return asyncio.get_running_loop().time()
