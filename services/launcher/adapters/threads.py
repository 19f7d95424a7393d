"""Calls that block for as long as a server likes, beside the event loop.

Not `asyncio.to_thread`: its few threads would all be taken by starts of machines, which last for
minutes, and an exit would wait for what a lost server never answers.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """What the call returns or raises, from a thread of its own that nobody waits for at the end.

    Cancelled, the call goes on unheard.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def told(result: T | None, error: BaseException | None) -> None:
        if answer.cancelled():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        # Whatever it is, it is raised where it is waited for.
        except BaseException as error:  # noqa: BLE001
            failure = error
        # The loop is closed if nobody waits any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(told, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await answer
