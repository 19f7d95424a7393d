"""Coroutines that run concurrently, and their cancellation.

Three rules hold for all functions here. No task outlives the call that started it. A cancelled
task may clean up: it is awaited, and not cancelled twice. A cancellation of the caller is never
lost, whenever it comes."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_AGAIN_S = 0.05


@asynccontextmanager
async def running_tasks(*work: Coroutine[Any, Any, T]) -> AsyncGenerator[list[asyncio.Task[T]]]:
    """Run `work` as tasks during the block; cancel those still running at its end."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        yield tasks
    finally:
        await cancel_tasks(tasks)


async def cancel_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for them; results and errors of cancelled work are dropped.

    A task that is already cancelled is only awaited: a second cancel would break its cleanup."""
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            if not task.cancelling():
                task.cancel()
        try:
            # Check again: an expiring `asyncio.timeout` also cancels its task, and takes that
            # back a moment later. Such a task continues, and must then be cancelled.
            await asyncio.wait(pending, timeout=_LOOK_AGAIN_S)
        except asyncio.CancelledError:
            # Our caller's own cancellation; `asyncio.gather` would pass it on to the tasks.
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # If it is not retrieved, asyncio logs it.
    if cancelled:
        raise asyncio.CancelledError


def raise_failure(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Raise the error of the first of `tasks` that has failed, if any has."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


async def run_until_first(*work: Coroutine[Any, Any, Any]) -> None:
    """Run all until one ends, cancel the others and wait for them; raise the first error."""
    async with running_tasks(*work) as tasks:
        await wait_for_any(tasks)
        raise_failure(tasks)
    # Errors that others raised while being cancelled.
    raise_failure(tasks)


async def run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; or None, and cancel `work`, when `stop` is set first."""
    async with running_tasks(work) as (task,):
        return task.result() if await wait_unless(stop, task) else None


async def wait_beside(main: asyncio.Task[T], beside: Collection[asyncio.Task[Any]]) -> T:
    """Return the result of `main`; raise the first error of it or of those beside it."""
    running: list[asyncio.Task[Any]] = [main, *beside]
    while not main.done():
        await wait_for_any(running)
        for task in running:
            if task.done():
                task.result()
        running = [task for task in running if not task.done()]
    return main.result()


async def wait_unless(
    stop: asyncio.Event, task: asyncio.Task[Any], timeout_s: float | None = None
) -> bool:
    """Wait for a task until `stop` is set or the time is over; return True if it is done.

    The task is the caller's: it is not cancelled."""
    async with running_tasks(stop.wait()) as (stopped,):
        await wait_for_any((task, stopped), timeout_s)
        return task.done()


async def wait_for_any(
    tasks: Collection[asyncio.Task[Any]], timeout_s: float | None = None
) -> bool:
    """Wait until one of `tasks` is done; return False if none is after `timeout_s`."""
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=first)
    return bool(done)


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait until `event` is set or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


@contextmanager
def keep_cancellation() -> Generator[None]:
    """Raise CancelledError at the end of a block that swallowed a cancellation of its task.

    Up to Python 3.11 `asyncio.wait_for`, which libraries use, loses a cancellation that comes as
    the wait ends (python/cpython#86296)."""
    task = asyncio.current_task()
    requests = task.cancelling() if task else 0
    yield
    if task and task.cancelling() > requests:
        raise asyncio.CancelledError
