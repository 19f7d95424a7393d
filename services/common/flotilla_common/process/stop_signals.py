"""Signals that request a process to stop: the first one, and later ones."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Handler of SIGTERM and Ctrl-C that distinguishes the first signal from later ones.

    One Ctrl-C may arrive twice, from the terminal and from a parent that forwards it: a signal
    within `same_s` of the first is the same request."""

    def __init__(
        self,
        on_first: Callable[[int], object],
        on_later: Callable[[int], object],
        *,
        same_s: float = 0.0,
    ) -> None:
        """Create a handler; both callables get the signal's number, `on_later` each time."""
        self._on_first = on_first
        self._on_later = on_later
        self._same_s = same_s
        self._first_at: float | None = None

    def note_signal(self, number: int = signal.SIGINT) -> None:
        """Handle a request to stop, as if by this signal."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._on_first(number)
        elif now - self._first_at > self._same_s:
            self._on_later(number)

    def handle_in_loop(self, numbers: Iterable[int] = STOP_SIGNALS) -> None:
        """Handle the signals in the running loop, between its callbacks, until it closes."""
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.note_signal, number)

    def handle_at_once(self) -> None:
        """Handle the signals at any point of the main thread, even if that blocks the loop."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.note_signal(number)


def remove_from_loop(numbers: Iterable[int]) -> None:
    """Remove the running loop's handlers of these signals."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.remove_signal_handler(number)
