"""Room for trajectories on their way in: bytes under way, of one worker and of all. No I/O."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class RoomFullError(Exception):
    """Too many wait already."""


@dataclass(slots=True, eq=False)
class _Place:
    worker_id: str
    size: int
    given: asyncio.Event = field(default_factory=asyncio.Event)


class Room:
    """Gives place in the order of arrival; a worker at its own bound holds up no other.

    A trajectory takes its whole place before it is read, so that those who have one can finish.
    One that is larger than a bound has the bound to itself.
    """

    def __init__(self, *, worker_bytes: int, total_bytes: int) -> None:
        self._worker_bytes = worker_bytes
        self._total_bytes = total_bytes
        self._taken: Counter[str] = Counter()
        self._waiting: deque[_Place] = deque()
        self._waiting_bytes = 0

    @property
    def taken(self) -> int:
        """Bytes that have a place."""
        return self._taken.total()

    @asynccontextmanager
    async def place(self, worker_id: str, size: int, *, header: int) -> AsyncGenerator[None]:
        """Wait for a place, and hold it while the block runs; `header` is held while it waits.

        Raises RoomFullError when the headers of those who wait take as much as all may have.
        """
        place = _Place(worker_id, size + header)
        if self._waiting_bytes + header > self._total_bytes:
            raise RoomFullError(
                f"{len(self._waiting)} trajectories wait for their turn already; send again later"
            )
        self._waiting.append(place)
        self._waiting_bytes += header
        self._give()
        try:
            await place.given.wait()
        except asyncio.CancelledError:
            self._leave(place)
            raise
        finally:
            self._waiting_bytes -= header
        try:
            yield
        finally:
            self._free(place)

    def _give(self) -> None:
        for place in list(self._waiting):
            if self.taken and self.taken + place.size > self._total_bytes:
                # The next in line: who is smaller does not overtake it.
                return
            own = self._taken[place.worker_id]
            if not own or own + place.size <= self._worker_bytes:
                self._waiting.remove(place)
                self._taken[place.worker_id] += place.size
                place.given.set()

    def _leave(self, place: _Place) -> None:
        if place.given.is_set():
            self._free(place)
        else:
            self._waiting.remove(place)
            self._give()

    def _free(self, place: _Place) -> None:
        self._taken[place.worker_id] -= place.size
        if not self._taken[place.worker_id]:
            del self._taken[place.worker_id]
        self._give()
