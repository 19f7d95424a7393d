"""Slots of the engines that one replica runs side by side (`rollout.engine.data_parallel`)."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from flotilla_common.aio.bounded_dict import BoundedDict

# Attempts whose engine is remembered: many more than run at once.
HOMES_KEPT = 16384


class EngineSlots:
    """Slots of running requests, a fixed number in each engine.

    An attempt's turns go to one engine, whose cache holds its prefix, unless that engine is full
    and another is not: recomputing a prefix takes less time than waiting."""

    def __init__(self, engines: int, each: int) -> None:
        self.engines = engines
        self._each = each
        self._free = asyncio.Semaphore(engines * each)
        self._running = [0] * engines
        # By the seed of the attempt's sampling, the latest last.
        self._homes: BoundedDict[int, int] = BoundedDict(HOMES_KEPT)

    @asynccontextmanager
    async def take_slot(self, seed: int, ends: float) -> AsyncGenerator[int | None]:
        """Take a slot for a turn; yield the index of its engine, or None if none is free by
        `ends`."""
        try:
            async with asyncio.timeout_at(ends):
                await self._free.acquire()
        except TimeoutError:
            yield None
            return
        engine = self._choose_engine(seed)
        self._running[engine] += 1
        try:
            yield engine
        finally:
            self._running[engine] -= 1
            self._free.release()

    def _choose_engine(self, seed: int) -> int:
        home = self._homes.get(seed)
        if home is None or self._running[home] >= self._each:
            home = min(range(self.engines), key=self._running.__getitem__)
        self._homes[seed] = home
        return home
