"""Queue of requests to one instance: shared ones get their turns together, all others alone."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class TurnPlace:
    """A place in line. Adjacent `shared` places have their turn together."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.has_left = False
        self.turn = asyncio.Event()


class TurnLine:
    """First come, first served. A place may leave at any time, even before it is in line."""

    def __init__(self) -> None:
        # In order; a dict, because places leave from its middle.
        self._places: dict[TurnPlace, None] = {}

    def enter_line(self, place: TurnPlace) -> TurnPlace:
        if not place.has_left:
            self._places[place] = None
            self._call_up()
        return place

    def leave_line(self, place: TurnPlace) -> None:
        place.has_left = True
        if place in self._places:
            del self._places[place]
            self._call_up()

    @asynccontextmanager
    async def hold_turn(self, place: TurnPlace, until: float | None = None) -> AsyncGenerator[None]:
        """Hold a place's turn, and leave the line with it; TimeoutError at `until`."""
        try:
            if not place.turn.is_set():
                # A timer only if there is a wait.
                async with asyncio.timeout_at(until):
                    await place.turn.wait()
            yield
        finally:
            self.leave_line(place)

    def _call_up(self) -> None:
        """Give the first in line its turn; if it is shared, also the shared ones directly behind
        it."""
        for index, place in enumerate(self._places):
            if index and not place.shared:
                return
            place.turn.set()
            if not place.shared:
                return
