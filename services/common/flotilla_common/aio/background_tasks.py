"""Work that continues when its caller goes away."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """Tasks in progress, referenced so that none is garbage-collected."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[Any]] = set()

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    async def run_shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish `work` even if the caller goes away."""
        return await asyncio.shield(self.start_task(work))
