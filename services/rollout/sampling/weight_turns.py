"""Turns of sets of weights at an engine that holds one of them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from services.common.aio.background_tasks import BackgroundTasks


class WeightTurns:
    """Requests run while their own set is loaded. Those to another set wait until the running ones
    have been answered, and from then on so do all that come later: sets take turns in the order of
    their first waiting request, so that none starves."""

    def __init__(self, load: Callable[[int], Awaitable[None]], loaded: int) -> None:
        """Begin with the set `loaded`; `load` replaces it by another."""
        self._load = load
        self._loaded = loaded
        self._running = 0
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._switching = False
        self._switches = BackgroundTasks()

    @asynccontextmanager
    async def take_turn(self, name: int) -> AsyncGenerator[None]:
        """Wait until the set is loaded, and keep it loaded in the block. Raises the error of its
        loading."""
        if name == self._loaded and not self._waiting and not self._switching:
            self._running += 1
        else:
            await self._wait(name)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, name: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(admitted)
        self._advance()
        try:
            await admitted
        except asyncio.CancelledError:
            # Admitted and cancelled in one pass of the loop: the turn has begun.
            if not admitted.cancelled() and admitted.exception() is None:
                self._leave()
            raise

    def _leave(self) -> None:
        self._running -= 1
        self._advance()

    def _advance(self) -> None:
        """Begin the next turn if the present one is over."""
        if self._waiting and not self._running and not self._switching:
            self._switching = True
            self._switches.start_task(self._switch(next(iter(self._waiting))))

    async def _switch(self, name: int) -> None:
        failure: Exception | None = None
        try:
            if name != self._loaded and any(not each.done() for each in self._waiting[name]):
                await self._load(name)
                self._loaded = name
        # The waiting requests raise it.
        except Exception as error:  # noqa: BLE001
            failure = error
        self._switching = False
        for admitted in self._waiting.pop(name):
            if admitted.done():
                continue
            if failure is None:
                self._running += 1
                admitted.set_result(None)
            else:
                admitted.set_exception(failure)
        self._advance()
