"""What the notifier needs from whatever takes messages."""

from typing import Protocol

from services.launcher.notify.outbox import Letter


class LaterError(Exception):
    """It did not get through and may another time. `unsure`: it may have arrived all the same."""

    def __init__(self, why: str, *, after_s: float = 0.0, unsure: bool = False) -> None:
        super().__init__(why)
        self.after_s = after_s
        self.unsure = unsure


class RefusedError(Exception):
    """It will not get through until somebody mends something; the message says what."""


class Sink(Protocol):
    """Takes letters to one target. Both methods raise LaterError and RefusedError."""

    async def send(self, letter: Letter) -> str:
        """Deliver it; returns the thread that it is part of."""
        ...

    async def find(self, letter: Letter) -> str | None:
        """The thread of a letter that has arrived before; None where it has not, or cannot be
        looked for."""
        ...

    async def close(self) -> None: ...
