"""Budget for incoming trajectories: bytes in flight, per worker and in total. No I/O."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class IntakeFullError(Exception):
    """Too many trajectories are already waiting."""


@dataclass(slots=True, eq=False)
class _Reservation:
    worker_id: str
    size: int
    given: asyncio.Event = field(default_factory=asyncio.Event)


class IntakeBudget:
    """Budget granted in order of arrival; a worker at its own bound blocks no other.

    A trajectory reserves all of its bytes before it is read, so that those with a reservation
    can finish. One larger than a bound has the bound to itself."""

    def __init__(self, *, worker_bytes: int, total_bytes: int) -> None:
        self._worker_bytes = worker_bytes
        self._total_bytes = total_bytes
        self._taken: Counter[str] = Counter()
        self._waiting: deque[_Reservation] = deque()
        self._waiting_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """Reserved bytes."""
        return self._taken.total()

    @asynccontextmanager
    async def reserve_bytes(
        self, worker_id: str, size: int, *, header: int
    ) -> AsyncGenerator[None]:
        """Wait for a reservation, and hold it within the block; `header` is held while waiting.

        Raises IntakeFullError if the waiting headers already take as much as all may have."""
        place = _Reservation(worker_id, size + header)
        if self._waiting_bytes + header > self._total_bytes:
            raise IntakeFullError(
                f"{len(self._waiting)} trajectories are already waiting; send again later"
            )
        self._waiting.append(place)
        self._waiting_bytes += header
        self._grant_waiting()
        try:
            await place.given.wait()
        except asyncio.CancelledError:
            self._leave_queue(place)
            raise
        finally:
            self._waiting_bytes -= header
        try:
            yield
        finally:
            self._free_bytes(place)

    def _grant_waiting(self) -> None:
        for place in list(self._waiting):
            if self.taken_bytes and self.taken_bytes + place.size > self._total_bytes:
                # Strictly first come, first served: smaller ones do not overtake.
                return
            own = self._taken[place.worker_id]
            if not own or own + place.size <= self._worker_bytes:
                self._waiting.remove(place)
                self._taken[place.worker_id] += place.size
                place.given.set()

    def _leave_queue(self, place: _Reservation) -> None:
        if place.given.is_set():
            self._free_bytes(place)
        else:
            self._waiting.remove(place)
            self._grant_waiting()

    def _free_bytes(self, place: _Reservation) -> None:
        self._taken[place.worker_id] -= place.size
        if not self._taken[place.worker_id]:
            del self._taken[place.worker_id]
        self._grant_waiting()
