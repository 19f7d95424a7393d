"""Ctrl-C: the first asks to stop in good order, the second to stop at once.

The end of the terminal is a Ctrl-C too, except under `nohup`, which has it ignored.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
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
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # Now: of a terminal that is gone nobody can say any more that it was one.
            loop.add_signal_handler(signal.SIGHUP, self._hang_up, [*_on_terminal()])
        try:
            yield self
        finally:
            for number in (*_SIGNALS, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _hang_up(self, printing: Sequence[int]) -> None:
        """What is printed on a terminal that is gone fails, and would end more than printing."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in printing:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        self.note()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`; on the first Ctrl-C cancel it and raise InterruptedByUserError."""
        return await _unless(self.first, work)

    async def unless_again(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, but on the second."""
        return await _unless(self.second, work)


def _on_terminal() -> Iterator[int]:
    """The descriptors of what prints on a terminal."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and stream.isatty():
            yield stream.fileno()


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
