"""Calls that block for as long as a server likes, each in a thread of its own.

Not `asyncio.to_thread`: starts of machines last for minutes and would take all of its few
threads, and an exit would wait for what a lost server never answers."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(call: Callable[[], T]) -> Future[T]:
    """Start the call in a thread; return the future of its result. The thread ends with the
    call, or with the process."""
    done = Future[T]()
    # A call that has begun cannot be cancelled.
    done.set_running_or_notify_cancel()

    def run_call() -> None:
        try:
            done.set_result(call())
        # The waiting caller raises it again.
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)

    Thread(target=run_call, daemon=True).start()
    return done


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run the call in a thread and return its result. If cancelled, the call continues and its
    result is dropped."""
    return await asyncio.wrap_future(start_in_thread(call))
