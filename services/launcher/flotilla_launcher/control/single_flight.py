"""Work shared by concurrent calls with the same key."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
# A caller whose deadline passed retries at once, or after it has looked up the launcher.
ABANDONED_AFTER_S = 10.0


class WorkCancelledError(Exception):
    """The work was cancelled before it was done."""


@dataclass(eq=False, slots=True)
class _SharedTask(Generic[T]):
    task: asyncio.Task[T]
    callers: int = 0


class SharedWork(Generic[K, T]):
    """Work under way, by key.

    A repeated call joins the work that the first one began, so callers may have shorter
    deadlines than the work. Work without a waiting caller is cancelled after a while."""

    def __init__(self, abandoned_after_s: float = ABANDONED_AFTER_S) -> None:
        self._abandoned_after_s = abandoned_after_s
        self._shared: dict[K, _SharedTask[T]] = {}

    async def join_or_begin(self, key: K, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the work under way for `key`, else of the work that `begin`
        starts. Raises WorkCancelledError."""
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _SharedTask(asyncio.create_task(begin()))
            shared.task.add_done_callback(lambda task: self._forget_done(key, task))
        shared.callers += 1
        try:
            return await asyncio.shield(shared.task)
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if shared.task.cancelled() and not (caller and caller.cancelling()):
                raise WorkCancelledError from error
            raise
        finally:
            shared.callers -= 1
            if not shared.callers and not shared.task.done():
                loop = asyncio.get_running_loop()
                loop.call_later(self._abandoned_after_s, self._cancel_if_abandoned, key, shared)

    def cancel_matching(self, chosen: Callable[[K], bool]) -> None:
        """Cancel the work for the chosen keys, even if callers wait for it."""
        for key in [key for key in self._shared if chosen(key)]:
            # Later calls begin new work.
            self._shared.pop(key).task.cancel()

    def _cancel_if_abandoned(self, key: K, shared: _SharedTask[T]) -> None:
        if not shared.callers and self._shared.get(key) is shared:
            self.cancel_matching(lambda each: each == key)

    def _forget_done(self, key: K, task: asyncio.Task[T]) -> None:
        if key in self._shared and self._shared[key].task is task:
            del self._shared[key]
        if not task.cancelled():
            # Mark the exception as retrieved: waiting callers, if any, have received it.
            task.exception()
