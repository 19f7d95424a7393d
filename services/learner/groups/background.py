"""Work that goes on when the call that asked for it goes away."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Writes:
    """Holds on to what is under way, so that it is not collected halfway."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` to its end even when the caller goes away."""
        return await asyncio.shield(self.start(work))
