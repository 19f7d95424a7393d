"""A backend in memory whose units do what a test tells them."""

import asyncio
import itertools
from collections.abc import Collection

from services.launcher.ports import BackendError, Evidence, Launch, Offer, Stray
from services.launcher.state import Exit, Unit

_SIGKILL, _SIGTERM = -9, -15


class FakeBackend:
    """Starts nothing. `finish` ends a unit; `stubborn` units ignore a drain."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.drained: list[Unit] = []
        self.killed: list[Unit] = []
        self.cleaned: list[str] = []
        self.left: list[Unit] = []
        # What a look for a run's remains finds.
        self.remains: str = ""
        self.refuse: str = ""
        self.stubborn = False
        self._ends: dict[Unit, asyncio.Future[Exit]] = {}
        self._pids = itertools.count(1)

    def running(self, service: str) -> list[Unit]:
        """The units of a service that have not ended, oldest first."""
        return [unit for unit in self._ends if f"/{service}-" in unit.name]

    def finish(self, unit: Unit, code: int = 0, tail: str = "") -> None:
        end = self._ends.pop(unit, None)
        if end is not None:
            end.set_result(Exit(code, tail))

    async def offer(self, launch: Launch) -> Offer:
        if self.refuse:
            raise BackendError(self.refuse)
        return Offer("nothing at all")

    async def start(self, launch: Launch) -> Unit:
        if self.refuse:
            raise BackendError(self.refuse)
        self.launches.append(launch)
        unit = Unit(launch.name, next(self._pids), 1.0)
        self._ends[unit] = asyncio.get_running_loop().create_future()
        return unit

    async def attach(self, launch: Launch, unit: Unit) -> bool:
        """What another launcher started is there as well."""
        self._ends.setdefault(unit, asyncio.get_running_loop().create_future())
        return True

    async def find(self, launch: Launch) -> Unit | None:
        return next((unit for unit in self._ends if unit.name == launch.name), None)

    async def undo(self, launch: Launch) -> None:
        unit = await self.find(launch)
        if unit is not None and await self.attach(launch, unit):
            await self.kill(unit)
            await self.wait(unit)

    async def price(self, launch: Launch) -> float | None:
        return None

    async def wait(self, unit: Unit) -> Exit:
        # Whoever stops waiting must not end the unit for all others.
        return await asyncio.shield(self._ends[unit])

    async def drain(self, unit: Unit) -> None:
        self.drained.append(unit)
        if not self.stubborn:
            self.finish(unit, _SIGTERM)

    async def kill(self, unit: Unit) -> None:
        self.killed.append(unit)
        self.finish(unit, _SIGKILL)

    async def orphans(self, known: Collection[Unit]) -> list[Unit]:
        return list({*known, *self.left})

    async def end(self, unit: Unit, grace_s: float) -> None:
        self.killed.append(unit)

    async def clean(self, run_id: str) -> Evidence:
        self.cleaned.append(run_id)
        return Evidence(not self.remains, self.remains)

    async def strays(self, active: Collection[str]) -> list[Stray]:
        found = [Stray(unit.name, unit.name.partition("/")[0]) for unit in self.left]
        return [stray for stray in found if stray.run_id not in active]

    async def reap(self, active: Collection[str]) -> list[str]:
        return []
