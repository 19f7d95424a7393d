"""Ctrl-C in a conversation: it ends the model's turn, and pressed again the conversation."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from flotilla_common.process.stop_signals import StopSignals, remove_from_loop
from flotilla_launcher.cli.interrupts import cancel_on_event

_SAME_PRESS_S = 0.3
_ENDS = (signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")


class TurnInterrupts:
    """The user's interrupts, counted anew at each line of the user. Before the first line, one
    ends the conversation. `tell` is called at the first of a line."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self.ended = asyncio.Event()
        self._tell = tell
        self._turn = asyncio.Event()
        self._presses = self._count_from(self._end)

    @property
    def turn_ended(self) -> bool:
        return self._turn.is_set()

    def begin_line(self) -> None:
        """Count from here on."""
        self._turn.clear()
        self._presses = self._count_from(self._end_turn)

    def note_press(self) -> None:
        """Record a Ctrl-C."""
        self._presses.note_signal()

    @contextmanager
    def catch_signals(self) -> Generator[None]:
        """Handle Ctrl-C within this context; SIGTERM and SIGHUP end the conversation at once."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.note_press)
        for number in _ENDS:
            loop.add_signal_handler(number, self.ended.set)
        try:
            yield
        finally:
            remove_from_loop((signal.SIGINT, *_ENDS))

    async def unless_turn_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; on Ctrl-C cancel it and raise InterruptedByUserError."""
        return await cancel_on_event(self._turn, work)

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the conversation; at its end by the user cancel it and raise
        InterruptedByUserError."""
        return await cancel_on_event(self.ended, work)

    def _count_from(self, first: Callable[[int], object]) -> StopSignals:
        return StopSignals(first, self._end, same_s=_SAME_PRESS_S)

    def _end_turn(self, _number: int) -> None:
        self._turn.set()
        self._tell()

    def _end(self, _number: int) -> None:
        self.ended.set()
