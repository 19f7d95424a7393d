"""Cleanup of leftovers at SkyPilot, with a check that they are gone."""

import time
from collections.abc import Callable, Iterable

from services.launcher.backends.ports import CleanupEvidence, OrphanResource
from services.launcher.backends.sky import names, orphan_names
from services.launcher.backends.sky.job_queue import JobQueue
from services.launcher.backends.sky.ports import SkyPilotApi
from services.launcher.backends.sky.status import Cluster, Job, Place

# Time that SkyPilot may take to end machines before leftovers count.
_PATIENCE_S = 90.0


class SkyCleaner:
    """Cleaner of one launcher's jobs and clusters, identified by name."""

    def __init__(self, client: SkyPilotApi, board: JobQueue, owner: str) -> None:
        self._client = client
        self._board = board
        self._owner = owner

    async def list_live_members(self) -> dict[str, bool]:
        """Return the active replicas of this launcher; the value is True for a cluster of its
        own."""
        plain = {each.name: True for each in await self._client.list_clusters() if not each.managed}
        jobs = {job.task: False for job in await self._board.fresh_jobs() if not job.over}
        return {name: own for name, own in {**plain, **jobs}.items() if self._is_member(name)}

    def _is_member(self, name: str) -> bool:
        owned = names.parse_name(name)
        return owned is not None and owned.owner == self._owner and owned.key is not None

    async def clean_run(self, is_ours: Callable[[str], bool]) -> CleanupEvidence:
        """End everything left of a run, identified by `is_ours`; return the state at SkyPilot and
        the clouds as evidence."""
        deadline = time.monotonic() + _PATIENCE_S
        requested: set[str] = set()
        while True:
            coming = await self._client.cancel_pending(is_ours)
            jobs, clusters = await self._find_left(is_ours)
            if not coming and not jobs and not clusters:
                return CleanupEvidence(True, "SkyPilot shows no job and no cluster of the run")
            if time.monotonic() > deadline:
                return CleanupEvidence(
                    False, _format_left(jobs, clusters) or "SkyPilot is still starting some"
                )
            await self._end_found(jobs, clusters, requested)
            await self._board.pause_between_polls()

    async def list_orphans(
        self, is_orphan: Callable[[str], bool], runs: Iterable[str]
    ) -> list[OrphanResource]:
        """List the resources with orphans' names. `runs` are the runs whose marks can be
        resolved."""
        jobs, clusters = await self._find_left(is_orphan)
        marks = {names.run_mark(run_id): run_id for run_id in runs}

        def make_orphan(shown: str, name: str, status: str, place: Place | None) -> OrphanResource:
            run_id = marks.get(orphan_names.run_mark_of(name), "")
            return OrphanResource(shown, run_id, f"{status} at {place}" if place else status)

        found = [make_orphan(f"job {j.job_id} {j.task}", j.task, j.status, j.place) for j in jobs]
        found += [make_orphan(c.name, c.name, c.status, c.place) for c in clusters]
        return sorted(found, key=lambda each: each.name)

    async def end_orphans(self, is_orphan: Callable[[str], bool]) -> list[str]:
        """End the resources with orphans' names; report which are gone."""
        jobs, clusters = await self._find_left(is_orphan)
        if not jobs and not clusters:
            return []
        await self._end_found(jobs, clusters, set())
        left_jobs, left_clusters = await self._find_left(is_orphan)
        left = {*_list_names(left_jobs, left_clusters)}
        return [
            f"{name}: {'end requested, still there' if name in left else 'ended'}"
            for name in _list_names(jobs, clusters)
        ]

    async def _find_left(self, ours: Callable[[str], bool]) -> tuple[list[Job], list[Cluster]]:
        jobs = [
            j
            for j in await self._board.fresh_jobs()
            if not j.over and (ours(j.task) or ours(j.name))
        ]
        known = [c.name for c in await self._client.list_clusters() if ours(c.name)]
        # Only the clouds can confirm SkyPilot's table.
        found = await self._client.list_clusters(certain=known) if known else []
        return jobs, [cluster for cluster in found if ours(cluster.name)]

    async def _end_found(
        self, jobs: list[Job], clusters: list[Cluster], requested: set[str]
    ) -> None:
        """Request the end of each once.

        SkyPilot ends the clusters of its jobs. Other clusters are ended here, such as one that its
        server was starting when it was stopped."""
        ids = sorted({job.job_id for job in jobs if f"job {job.job_id}" not in requested})
        requested |= {f"job {job_id}" for job_id in ids}
        await self._client.cancel_jobs(ids)
        if jobs:
            return
        for cluster in clusters:
            if cluster.name not in requested:
                requested.add(cluster.name)
                await self._client.tear_down_cluster(cluster.name)


def _list_names(jobs: list[Job], clusters: list[Cluster]) -> list[str]:
    return sorted({f"job {job.job_id} {job.task}" for job in jobs} | {c.name for c in clusters})


def _format_left(jobs: list[Job], clusters: list[Cluster]) -> str:
    shown = [f"job {job.job_id} {job.task} is {job.status}" for job in jobs]
    shown += [f"cluster {cluster.name} is {cluster.status}" for cluster in clusters]
    return "; ".join(shown)
