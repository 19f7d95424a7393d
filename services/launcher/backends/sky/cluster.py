"""Replicas as clusters of their own, for API servers that cannot run Job Groups."""

import asyncio
from collections.abc import Iterable

from services.launcher.backends.sky import status as records
from services.launcher.backends.sky import tasks
from services.launcher.backends.sky.ports import Client
from services.launcher.backends.sky.start import Start
from services.launcher.backends.sky.status import NO_JOB, Cluster, Place
from services.launcher.ports import BackendUnreachable, CapacityError
from services.launcher.state import Exit

_KILLED = -9
_UP, _STOPPED = "UP", "STOPPED"
# How often in a row SkyPilot may say that something is wrong with a machine, before it is ended.
_LOOKS = 30


class Clusters:
    """Starts, watches and ends plain clusters with one job each, by their names."""

    def __init__(self, client: Client, poll_s: float) -> None:
        self._client = client
        # Each look at a job is a call to its machine.
        self._poll_s = poll_s
        self._killed: set[str] = set()

    async def start(self, start: Start) -> None:
        """Returns when the replica's job is on its machine."""
        self._killed.discard(start.name)
        document = tasks.task(start.site, start.key, start.launch.attempt)
        try:
            async with asyncio.timeout(start.limit_s):
                await self._client.launch(document, start.secrets)
        except TimeoutError:
            text = f"{start.name}: no machine was ready after {start.limit_s:g} s"
            raise CapacityError(text) from None

    async def undo(self, name: str) -> None:
        """End what a start has left, be it half a machine: the next one finds nothing in its
        way."""
        await self.kill(name)

    async def attach(self, name: str, limit_s: float) -> bool:
        """Whether the job goes on of a replica that was there before. A machine that is out of
        order is waited for as in `wait`: False ends it. SkyPilot looks for no other one, so that
        there is no limit to that."""
        return _goes_on(await self._status(name))

    async def live(self, name: str) -> bool:
        """Whether its job goes on. One whose launch was never finished is launched again, on the
        machine that it has."""
        found = await self._found(name)
        if found is None or found.status != _UP:
            return False
        return _goes_on(await self._client.job_status(name))

    async def wait(self, name: str) -> Exit:
        """How the replica's job ended; its machine is gone then."""
        while True:
            status = await self._status(name)
            if name in self._killed:
                return Exit(_KILLED)
            if status is None:
                return Exit(1, "its machine is gone", preempted=True)
            stage = records.stage_of(status)
            if stage.over:
                await self._client.down(name)
                return records.exit_at(stage, status)
            await asyncio.sleep(self._poll_s)

    async def place(self, name: str) -> Place | None:
        """Where its machines are."""
        found = _named(name, await self._client.clusters())
        return found.place if found is not None else None

    async def _status(self, name: str) -> str | None:
        """That of its job; None where its machine is gone, or as good as gone."""
        looks = 0
        while True:
            try:
                return await self._client.job_status(name)
            except BackendUnreachable:
                # A machine that was taken away does not answer either; its cloud knows.
                found = await self._found(name)
                if found is not None and found.status == _UP:
                    raise
            looks += 1
            if found is None:
                return None
            if found.status == _STOPPED or looks >= _LOOKS:
                await self._client.down(name)
                return None
            await asyncio.sleep(self._poll_s)

    async def _found(self, name: str) -> Cluster | None:
        return _named(name, await self._client.clusters(certain=[name]))

    async def drain(self, name: str) -> None:
        """Its watcher is told by the launcher; what has no machine yet is not waited for."""
        await self._client.forget(lambda asked: asked == name)

    async def kill(self, name: str) -> None:
        await self._client.forget(lambda asked: asked == name)
        await self._client.down(name)
        self._killed.add(name)


def _goes_on(status: str | None) -> bool:
    return status not in (None, NO_JOB) and not records.stage_of(status).over


def _named(name: str, clusters: Iterable[Cluster]) -> Cluster | None:
    return next((cluster for cluster in clusters if cluster.name == name), None)
