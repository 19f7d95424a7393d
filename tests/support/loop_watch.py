"""How long an event loop was held by one turn of it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from flotilla_common.aio.concurrency import running_tasks


class LoopWatch:
    """The longest turn so far, in seconds of the loop's own CPU time: other processes of a busy
    machine do not count."""

    longest_s = 0.0

    async def _watch(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - before)


@asynccontextmanager
async def watched_loop() -> AsyncGenerator[LoopWatch]:
    watch = LoopWatch()
    async with running_tasks(watch._watch()):  # pyright: ignore[reportPrivateUsage]
        yield watch
