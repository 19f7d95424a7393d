"""Ctrl-C handling: the first one requests a graceful stop, the second one an immediate stop.
`stop_on_interrupt.py` stops the run.

A hang-up of the terminal counts as a Ctrl-C too, except under `nohup`, which ignores it."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from flotilla_common.aio.concurrency import running_tasks, wait_unless
from flotilla_common.process.stop_signals import STOP_SIGNALS, StopSignals, remove_from_loop

_SAME_PRESS_S = 0.3
T = TypeVar("T")


class InterruptedByUserError(Exception):
    """Raised when the user interrupts the wait."""


class Interrupts:
    """Count of the user's interrupts: Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._signals = StopSignals(
            lambda _number: self.first.set(),
            lambda _number: self.second.set(),
            same_s=_SAME_PRESS_S,
        )

    def note_interrupt(self) -> None:
        """Record an interrupt."""
        self._signals.note_signal()

    @contextmanager
    def catch_signals(self) -> Generator["Interrupts"]:
        """Handle the signals within this context; none of them raises KeyboardInterrupt."""
        self._signals.handle_in_loop()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # Determined now: a closed terminal is no longer recognized as one.
            printing = [*_terminal_descriptors()]
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up, printing)
        try:
            yield self
        finally:
            remove_from_loop((*STOP_SIGNALS, signal.SIGHUP))

    def _hang_up(self, printing: Sequence[int]) -> None:
        """Redirect output away from the closed terminal, where every print would fail, and
        record an interrupt."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in printing:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        self.note_interrupt()

    async def unless_interrupted(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; on the first Ctrl-C cancel it and raise InterruptedByUserError."""
        return await cancel_on_event(self.first, work)

    async def unless_interrupted_twice(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; on the second Ctrl-C cancel it and raise InterruptedByUserError."""
        return await cancel_on_event(self.second, work)


def _terminal_descriptors() -> Iterator[int]:
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and stream.isatty():
            yield stream.fileno()


async def cancel_on_event(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; on the event cancel it and raise InterruptedByUserError."""
    async with running_tasks(work) as (task,):
        if await wait_unless(event, task):
            return task.result()
        raise InterruptedByUserError
