"""Replicas on clusters of their own: started, watched and ended by name."""

import asyncio
from collections.abc import Iterable

from flotilla_launcher.backends.ports import BackendUnreachable, CapacityError
from flotilla_launcher.backends.sky import task_documents
from flotilla_launcher.backends.sky.ports import SkyPilotApi
from flotilla_launcher.backends.sky.prepared_launch import PreparedLaunch
from flotilla_launcher.backends.sky.signs_of_life import SignsOfLife
from flotilla_launcher.backends.sky.status import NO_JOB, UP, Cluster, Place, exit_from_status
from flotilla_launcher.state import ExitStatus

_KILLED = -9
_STOPPED = "STOPPED"
# Consecutive reports of a broken machine after which it is ended.
_MAX_BROKEN_LOOKS = 30


class ClusterManager:
    """Manager of clusters with one job each."""

    def __init__(self, client: SkyPilotApi, signs: SignsOfLife, poll_s: float) -> None:
        self._client = client
        self._signs = signs
        # Each look at a job is a call to its machine.
        self._poll_s = poll_s
        self._killed: set[str] = set()
        # Where each replica's machines are or were last.
        self._places: dict[str, Place] = {}
        # Where each replica that was preempted had its machine.
        self._lost: dict[str, Place] = {}

    def lost_place(self, name: str) -> Place | None:
        """Return where the replica's machine was when it was last taken away."""
        return self._lost.get(name)

    def note_loss(self, name: str) -> None:
        """Note that the replica's machine is being taken away, or is gone."""
        if name in self._places:
            self._lost[name] = self._places[name]

    async def start_replica(self, start: PreparedLaunch) -> None:
        """Start the replica; return when its job is on its machine."""
        self._killed.discard(start.name)
        document = task_documents.replica_task(start.site, start.key, start.machines)
        try:
            async with asyncio.timeout(start.limit_s):
                await self._client.launch_cluster(document, start.secrets)
        except TimeoutError:
            text = f"{start.name}: no machine was ready after {start.limit_s:g} s"
            raise CapacityError(text) from None
        self._signs.expect_reports(start.name)

    async def attach_replica(self, name: str) -> bool:
        """Return whether the job of an earlier replica is still active.

        A broken machine is polled as in `wait_for_exit`, until it recovers or is ended."""
        active = _is_active(await self._poll_job_status(name))
        if active:
            self._signs.expect_reports(name)
        return active

    async def is_live(self, name: str) -> bool:
        """Return whether the replica's job is active.

        An unfinished launch is repeated on its machine."""
        found = await self._find_cluster(name)
        if found is None or found.status != UP:
            return False
        return _is_active(await self._client.get_job_status(name))

    async def wait_for_exit(self, name: str) -> ExitStatus:
        """Wait until the replica's job has ended and its machine is gone; return how it ended.

        SkyPilot is not asked while the machine's watcher reports."""
        while True:
            await self._signs.wait_until_doubtful(name)
            status = await self._poll_job_status(name)
            if name in self._killed:
                return ExitStatus(_KILLED)
            if status is None:
                self.note_loss(name)
                return ExitStatus(1, "its machine is gone", preempted=True)
            how = exit_from_status(status)
            if how is not None:
                await self._client.tear_down_cluster(name)
                return how
            await asyncio.sleep(self._poll_s)

    async def find_place(self, name: str) -> Place | None:
        """Return where the replica's machines are."""
        found = _find_by_name(name, await self._client.list_clusters())
        place = found.place if found is not None else None
        if place is not None:
            self._places[name] = place
        return place

    async def _poll_job_status(self, name: str) -> str | None:
        """Poll the status of the job; None if its machine is gone or beyond repair."""
        looks = 0
        while True:
            try:
                return await self._client.get_job_status(name)
            except BackendUnreachable:
                # A preempted machine does not answer either; its cloud knows.
                found = await self._find_cluster(name)
                if found is not None and found.status == UP:
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
        """End the replica, or what its start has left: a half-made machine would block the next."""
        await self._client.cancel_pending(lambda replica: replica == name)
        await self._client.tear_down_cluster(name)
        self._killed.add(name)
        self._signs.doubt_replica(name)


def _is_active(status: str | None) -> bool:
    return status not in (None, NO_JOB) and exit_from_status(status) is None


def _find_by_name(name: str, clusters: Iterable[Cluster]) -> Cluster | None:
    return next((cluster for cluster in clusters if cluster.name == name), None)
