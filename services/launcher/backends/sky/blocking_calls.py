"""Calls that block for as long as a server likes, each in a thread of its own.

Not `asyncio.to_thread`: its few threads would all be taken by starts of machines, which last for
minutes, and an exit would wait for what a lost server never answers.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def begin(call: Callable[[], T]) -> Future[T]:
    """What the call will return or raise. Its thread ends with it, or with the process."""
    done = Future[T]()
    # Nobody can cancel what has begun.
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        # Whoever waits raises it again.
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done


async def in_thread(call: Callable[[], T]) -> T:
    """What the call returns or raises. Cancelled, it goes on unheard."""
    return await asyncio.wrap_future(begin(call))
