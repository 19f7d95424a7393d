"""Clock for all times in the lease book."""

import asyncio


def loop_time() -> float:
    """Return monotonic seconds."""
    return asyncio.get_running_loop().time()
