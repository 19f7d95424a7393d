"""Coroutines that run beside each other."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def run_until_first(*work: Coroutine[Any, Any, Any]) -> None:
    """Run all until one ends, cancel the others and wait for them; raise the first error."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in tasks if task.done()]
        await cancel_tasks(tasks)
    for task in [*ended, *tasks]:
        if not task.cancelled():
            task.result()


async def run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; or None, and cancel `work`, when `stop` is set first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel_tasks([task, stopped])


async def cancel_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel and wait; results and errors of cancelled work are of no use to the caller.

    What is cancelled already is left to clean up: a second cancelling would break into that.
    """
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
