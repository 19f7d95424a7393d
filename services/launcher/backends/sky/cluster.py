"""Replicas as clusters of their own, for API servers that cannot run Job Groups."""

import asyncio
from collections.abc import Iterable

from services.launcher.backends.ports import BackendUnreachable, CapacityError
from services.launcher.backends.sky import status as records
from services.launcher.backends.sky import task_documents
from services.launcher.backends.sky.ports import SkyPilotApi
from services.launcher.backends.sky.prepared_launch import PreparedLaunch
from services.launcher.backends.sky.status import NO_JOB, Cluster, Place
from services.launcher.state import ExitStatus

_KILLED = -9
_UP, _STOPPED = "UP", "STOPPED"
# Consecutive reports of a broken machine after which it is ended.
_MAX_BROKEN_LOOKS = 30


class ClusterManager:
    """Manager of plain clusters with one job each: starts, watches and ends them by name."""

    def __init__(self, client: SkyPilotApi, poll_s: float) -> None:
        self._client = client
        # Each look at a job is a call to its machine.
        self._poll_s = poll_s
        self._killed: set[str] = set()

    async def start_replica(self, start: PreparedLaunch) -> None:
        """Start the replica; return when its job is on its machine."""
        self._killed.discard(start.name)
        document = task_documents.replica_task(start.site, start.key, start.launch.attempt)
        try:
            async with asyncio.timeout(start.limit_s):
                await self._client.launch_cluster(document, start.secrets)
        except TimeoutError:
            text = f"{start.name}: no machine was ready after {start.limit_s:g} s"
            raise CapacityError(text) from None

    async def undo_start(self, name: str) -> None:
        """End what a start has left, even a half-made machine that would block the next start."""
        await self.kill_replica(name)

    async def attach_replica(self, name: str, limit_s: float) -> bool:
        """Return whether the job of an earlier replica is still active.

        A broken machine is polled as in `wait_for_exit`, until it recovers or is ended. SkyPilot
        looks for no other machine, so `limit_s` does not apply."""
        return _is_active(await self._poll_job_status(name))

    async def is_live(self, name: str) -> bool:
        """Return whether the replica's job is active.

        An unfinished launch is repeated on its machine."""
        found = await self._find_cluster(name)
        if found is None or found.status != _UP:
            return False
        return _is_active(await self._client.get_job_status(name))

    async def wait_for_exit(self, name: str) -> ExitStatus:
        """Wait until the replica's job has ended and its machine is gone; return how it ended."""
        while True:
            status = await self._poll_job_status(name)
            if name in self._killed:
                return ExitStatus(_KILLED)
            if status is None:
                return ExitStatus(1, "its machine is gone", preempted=True)
            stage = records.stage_from_status(status)
            if stage.over:
                await self._client.tear_down_cluster(name)
                return records.exit_from_stage(stage, status)
            await asyncio.sleep(self._poll_s)

    async def find_place(self, name: str) -> Place | None:
        """Return where the replica's machines are."""
        found = _find_by_name(name, await self._client.list_clusters())
        return found.place if found is not None else None

    async def _poll_job_status(self, name: str) -> str | None:
        """Poll the status of the job; None if its machine is gone or beyond repair."""
        looks = 0
        while True:
            try:
                return await self._client.get_job_status(name)
            except BackendUnreachable:
                # A preempted machine does not answer either; its cloud knows.
                found = await self._find_cluster(name)
                if found is not None and found.status == _UP:
                    raise
            looks += 1
            if found is None:
                return None
            if found.status == _STOPPED or looks >= _MAX_BROKEN_LOOKS:
                await self._client.tear_down_cluster(name)
                return None
            await asyncio.sleep(self._poll_s)

    async def _find_cluster(self, name: str) -> Cluster | None:
        return _find_by_name(name, await self._client.list_clusters(certain=[name]))

    async def drain_replica(self, name: str) -> None:
        """Cancel a start that has no machine yet, without waiting. The launcher itself notifies the
        watcher of a running replica."""
        await self._client.cancel_pending(lambda replica: replica == name)

    async def kill_replica(self, name: str) -> None:
        await self._client.cancel_pending(lambda replica: replica == name)
        await self._client.tear_down_cluster(name)
        self._killed.add(name)


def _is_active(status: str | None) -> bool:
    return status not in (None, NO_JOB) and not records.stage_from_status(status).over


def _find_by_name(name: str, clusters: Iterable[Cluster]) -> Cluster | None:
    return next((cluster for cluster in clusters if cluster.name == name), None)
