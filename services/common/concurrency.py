"""Coroutines that run beside each other, and what ends them.

Three rules hold for all functions here. No task outlives the call that started it. A cancelled
task is left to clean up: it is waited for, and not cancelled twice. A cancellation of the caller is
never lost, whenever it comes."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_AGAIN_S = 0.05


@asynccontextmanager
async def running_tasks(*work: Coroutine[Any, Any, T]) -> AsyncGenerator[list[asyncio.Task[T]]]:
    """Run `work` as tasks while the block runs; cancel what is left of them at its end."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        yield tasks
    finally:
        await cancel_tasks(tasks)


async def cancel_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel and wait; results and errors of cancelled work are of no use to the caller.

    What is cancelled already is left to clean up: a second cancelling would break into that."""
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            if not task.cancelling():
                task.cancel()
        try:
            # Looks again: an `asyncio.timeout` that expires cancels its task, too, and takes it
            # back a moment later. Such a task goes on, and has to be cancelled then.
            await asyncio.wait(pending, timeout=_LOOK_AGAIN_S)
        except asyncio.CancelledError:
            # The caller's own; `asyncio.gather` would hand it on to the tasks.
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # Without a look at it, asyncio would log it.
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
    # What others raised as they were cancelled.
    raise_failure(tasks)


async def run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; or None, and cancel `work`, when `stop` is set first."""
    async with running_tasks(work) as (task,):
        return task.result() if await wait_unless(stop, task) else None


async def wait_beside(main: asyncio.Task[T], beside: Collection[asyncio.Task[Any]]) -> T:
    """Return the result of `main`; raise the first error of any, also of those beside it."""
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

    The task is the caller's: it goes on."""
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


@contextmanager
def keep_cancellation() -> Generator[None]:
    """Raise CancelledError at the end of a block that has swallowed a cancellation of its task.

    `asyncio.wait_for` loses one that comes as the wait ends, up to Python 3.11
    (python/cpython#86296); libraries wait by it."""
    task = asyncio.current_task()
    requests = task.cancelling() if task else 0
    yield
    if task and task.cancelling() > requests:
        raise asyncio.CancelledError
