"""Whether a peer answers: work waits here while it is away."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from flotilla_tinker.ports import OrderRefused, Unavailable, Unknown

F = TypeVar("F")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class PeerWatch(Generic[F]):
    """What a peer last said about itself, until it is lost.

    Each loss begins a new era. Work that is lost with the peer is suspected of having killed it,
    but only if other calls had succeeded in that era: else the peer was just not up yet."""

    def __init__(self, describe: Callable[[], Awaitable[F]]) -> None:
        self._describe = describe
        self._facts: F | None = None
        self._asking = asyncio.Lock()
        # Newest facts, of an era that may be over.
        self.last_facts: F | None = None
        self.era = 0
        self._proven: set[int] = set()
        # Before it is asked again: longer each time, until a call has succeeded.
        self._pause_s = 0.0

    @property
    def is_away(self) -> bool:
        return self._facts is None

    async def facts(self) -> F:
        """Return what the peer says about itself; wait until it answers."""
        async with self._asking:
            while self._facts is None:
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                with suppress(OrderRefused, Unavailable, Unknown):
                    self._facts = self.last_facts = await self._describe()
            return self._facts

    def note_success(self, era: int) -> None:
        """Note a call that succeeded, begun in this era."""
        self._proven.add(era)
        self._pause_s = 0.0

    def note_loss(self, era: int) -> bool:
        """Note that the peer was lost during a call begun in this era; return whether it worked."""
        if era == self.era:
            self._facts = None
            self.era += 1
        return era in self._proven
