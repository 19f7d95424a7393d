"""In-memory backend whose units do as a test says."""

import asyncio
import itertools
from collections.abc import Collection

from services.launcher.backends.ports import (
    BackendError,
    CleanupEvidence,
    LaunchSpec,
    OrphanResource,
    ResourceOffer,
)
from services.launcher.state import ExitStatus, Unit

_SIGKILL, _SIGTERM = -9, -15


class FakeBackend:
    """Backend that starts nothing. `finish_unit` ends a unit; `stubborn` units ignore a drain."""

    def __init__(self) -> None:
        self.launches: list[LaunchSpec] = []
        self.drained: list[Unit] = []
        self.killed: list[Unit] = []
        self.cleaned: list[str] = []
        self.left: list[Unit] = []
        # What a look for a run's remains finds.
        self.remains: str = ""
        self.refuse: str = ""
        self.stubborn = False
        self._ends: dict[Unit, asyncio.Future[ExitStatus]] = {}
        self._pids = itertools.count(1)

    def list_running(self, service: str) -> list[Unit]:
        """List the units of a service that have not ended, oldest first."""
        return [unit for unit in self._ends if f"/{service}-" in unit.name]

    def finish_unit(self, unit: Unit, code: int = 0, tail: str = "") -> None:
        end = self._ends.pop(unit, None)
        if end is not None:
            end.set_result(ExitStatus(code, tail))

    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        if self.refuse:
            raise BackendError(self.refuse)
        return ResourceOffer("nothing at all")

    async def start_replica(self, launch: LaunchSpec) -> Unit:
        if self.refuse:
            raise BackendError(self.refuse)
        self.launches.append(launch)
        unit = Unit(launch.name, next(self._pids), 1.0)
        self._ends[unit] = asyncio.get_running_loop().create_future()
        return unit

    async def attach_replica(self, launch: LaunchSpec, unit: Unit) -> bool:
        """Attach any unit: those of another launcher are there as well."""
        self._ends.setdefault(unit, asyncio.get_running_loop().create_future())
        return True

    async def find_replica(self, launch: LaunchSpec) -> Unit | None:
        return next((unit for unit in self._ends if unit.name == launch.name), None)

    async def undo_start(self, launch: LaunchSpec) -> None:
        unit = await self.find_replica(launch)
        if unit is not None and await self.attach_replica(launch, unit):
            await self.kill_replica(unit)
            await self.wait_for_exit(unit)

    async def price_per_hour(self, launch: LaunchSpec) -> float | None:
        return None

    async def wait_for_exit(self, unit: Unit) -> ExitStatus:
        # Whoever stops waiting must not end the unit for all others.
        return await asyncio.shield(self._ends[unit])

    async def drain_replica(self, unit: Unit) -> None:
        self.drained.append(unit)
        if not self.stubborn:
            self.finish_unit(unit, _SIGTERM)

    async def kill_replica(self, unit: Unit) -> None:
        self.killed.append(unit)
        self.finish_unit(unit, _SIGKILL)

    async def list_orphans(self, known: Collection[Unit]) -> list[Unit]:
        return list({*known, *self.left})

    async def end_orphan(self, unit: Unit, grace_s: float) -> None:
        self.killed.append(unit)

    async def clean_run(self, run_id: str) -> CleanupEvidence:
        self.cleaned.append(run_id)
        return CleanupEvidence(not self.remains, self.remains)

    async def list_orphan_resources(self, active: Collection[str]) -> list[OrphanResource]:
        found = [OrphanResource(unit.name, unit.name.partition("/")[0]) for unit in self.left]
        return [orphan for orphan in found if orphan.run_id not in active]

    async def reap_orphans(self, active: Collection[str]) -> list[str]:
        return []
