"""A signal of changes to whoever waits for one."""

import asyncio


class ChangeSignal:
    """Signal that wakes all waiters on the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    @property
    def next_change(self) -> asyncio.Event:
        """Event of the next change. Take it *before* reading the state, then wait for it, so
        that no change is missed."""
        return self._event
