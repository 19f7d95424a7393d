"""A backend in memory whose units a test controls."""

import asyncio
import itertools
from collections.abc import Collection

from flotilla_launcher.backends.ports import (
    Backend,
    BackendError,
    CleanupEvidence,
    LaunchSpec,
    ResourceOffer,
)
from flotilla_launcher.state import ExitStatus, Unit

_SIGKILL, _SIGTERM = -9, -15


class FakeBackend(Backend):
    """Backend that starts nothing. `finish_unit` ends a unit; `stubborn` units ignore a drain."""

    def __init__(self) -> None:
        self.launches: list[LaunchSpec] = []
        self.drained: list[Unit] = []
        self.killed: list[Unit] = []
        self.cleaned: list[str] = []
        self.left: list[Unit] = []
        # The result of a search for a run's remains.
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
        """Attach any unit, including those of another launcher."""
        self._ends.setdefault(unit, asyncio.get_running_loop().create_future())
        return True

    async def wait_for_exit(self, unit: Unit) -> ExitStatus:
        end = self._ends.get(unit)
        # A caller that stops waiting must not end the unit for the others.
        return ExitStatus(None) if end is None else await asyncio.shield(end)

    async def drain_replica(self, unit: Unit) -> None:
        self.drained.append(unit)
        if not self.stubborn:
            self.finish_unit(unit, _SIGTERM)

    async def kill_replica(self, unit: Unit) -> None:
        self.killed.append(unit)
        self.finish_unit(unit, _SIGKILL)

    async def list_units(self, known: Collection[Unit] = ()) -> list[Unit]:
        return list(dict.fromkeys([*self._ends, *known, *self.left]))

    async def clean_run(self, run_id: str) -> CleanupEvidence:
        self.cleaned.append(run_id)
        return CleanupEvidence(not self.remains, self.remains)
