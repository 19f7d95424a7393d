"""Ctrl-C: the first asks to stop in good order, the second to stop at once."""

import asyncio
import signal
import time
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_PRESS_S = 0.3
T = TypeVar("T")


class InterruptedByUserError(Exception):
    """The user does not want to wait for this."""


class Interrupts:
    """How often the user has pressed Ctrl-C (or somebody sent SIGTERM or SIGHUP)."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._noted = 0.0

    def note(self) -> None:
        """One key press can arrive twice, from the terminal and from a parent that forwards it."""
        now = time.monotonic()
        if self.first.is_set() and now - self._noted > _SAME_PRESS_S:
            self.second.set()
        self._noted = now
        self.first.set()

    @contextmanager
    def caught(self) -> Generator["Interrupts"]:
        """Take the signals in from here on; none of them raises KeyboardInterrupt."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.note)
        try:
            yield self
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`; on the first Ctrl-C cancel it and raise InterruptedByUserError."""
        return await _unless(self.first, work)

    async def unless_again(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, but on the second."""
        return await _unless(self.second, work)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.create_task(work)
    interrupt = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise InterruptedByUserError
    finally:
        interrupt.cancel()
        task.cancel()
        await asyncio.gather(task, interrupt, return_exceptions=True)
