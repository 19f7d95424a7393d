"""Port of the notifier: sinks, which take messages."""

from typing import Protocol

from flotilla_launcher.notify.outbox import Letter


class DeliveryDelayedError(Exception):
    """A failed attempt that may succeed later. `unsure`: the letter may have arrived."""

    def __init__(self, why: str, *, after_s: float = 0.0, unsure: bool = False) -> None:
        super().__init__(why)
        self.after_s = after_s
        self.unsure = unsure


class DeliveryRefusedError(Exception):
    """A letter cannot get through until someone fixes the cause; the message names it."""


class Sink(Protocol):
    """Receiver of letters to one target. `send_letter` and `find_thread` raise
    DeliveryDelayedError and DeliveryRefusedError."""

    async def send_letter(self, letter: Letter) -> str:
        """Deliver the letter; return the thread that it is part of."""
        ...

    async def find_thread(self, letter: Letter) -> str | None:
        """Return the thread of a letter that has arrived before; None if it has not, or the sink
        cannot check."""
        ...

    async def close(self) -> None: ...
