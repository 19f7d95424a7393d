"""Turns of weights at an engine that computes with few of them in one step."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from flotilla_common.aio.background_tasks import BackgroundTasks


class WeightTurns:
    """Requests run while their weights have a place. If there is none, they wait until all requests
    of some other weights have been answered, and from then on so do all that come later: weights
    get places in the order of their first waiting request, so that none starves."""

    def __init__(
        self, load: Callable[[int], Awaitable[None]], places: int, loaded: tuple[int, ...] = ()
    ) -> None:
        """Begin with the weights `loaded`; `load` puts others in the place of idle ones."""
        self._load = load
        self._places = places
        # Weights that have a place, and their running requests.
        self._running = dict.fromkeys(loaded, 0)
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._switching = False
        self._switches = BackgroundTasks()

    @asynccontextmanager
    async def take_turn(self, name: int) -> AsyncGenerator[None]:
        """Wait until the weights have a place, and keep it in the block. Raises the error of their
        loading."""
        if name in self._running and not self._waiting:
            self._running[name] += 1
        else:
            await self._wait(name)
        try:
            yield
        finally:
            self._leave(name)

    async def _wait(self, name: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(admitted)
        self._advance()
        try:
            await admitted
        except asyncio.CancelledError:
            # Admitted and cancelled in one pass of the loop: the turn has begun.
            if not admitted.cancelled() and admitted.exception() is None:
                self._leave(name)
            raise

    def _leave(self, name: int) -> None:
        self._running[name] -= 1
        self._advance()

    def _advance(self) -> None:
        """Admit the first that wait, as far as there are places."""
        while self._waiting and not self._switching:
            name = next(iter(self._waiting))
            if name in self._running:
                self._admit(name, None)
                continue
            idle = [each for each, count in self._running.items() if not count]
            full = len(self._running) >= self._places
            if full and not idle:
                return
            self._switching = True
            self._switches.start_task(self._switch(name, idle[0] if full else None))

    async def _switch(self, name: int, former: int | None) -> None:
        failure: Exception | None = None
        try:
            if any(not each.done() for each in self._waiting[name]):
                await self._load(name)
                if former is not None:
                    del self._running[former]
                self._running[name] = 0
        # The waiting requests raise it.
        except Exception as error:  # noqa: BLE001
            failure = error
        self._switching = False
        self._admit(name, failure)
        self._advance()

    def _admit(self, name: int, failure: Exception | None) -> None:
        for admitted in self._waiting.pop(name):
            if admitted.done():
                continue
            if failure is None:
                self._running[name] += 1
                admitted.set_result(None)
            else:
                admitted.set_exception(failure)
