"""Takes away what is left at SkyPilot, and looks whether it is gone."""

import time
from collections.abc import Callable, Collection, Iterable

from services.launcher.backends.sky import names
from services.launcher.backends.sky import status as records
from services.launcher.backends.sky.ports import Client
from services.launcher.backends.sky.queue import Board
from services.launcher.backends.sky.status import Cluster, Job, Place
from services.launcher.ports import Evidence, Stray

# What SkyPilot may take to end machines, before a look at what is left counts.
_PATIENCE_S = 90.0


class Sweeper:
    """Knows a launcher's jobs and clusters by their names."""

    def __init__(self, client: Client, board: Board, owner: str) -> None:
        self._client = client
        self._board = board
        self._owner = owner

    async def live_members(self) -> dict[str, bool]:
        """Replicas of this launcher that go on, and whether each is a cluster of its own."""
        plain = {each.name: True for each in await self._client.clusters() if not each.managed}
        jobs = {job.task: False for job in await self._board.fresh() if not job.over}
        return {name: own for name, own in {**plain, **jobs}.items() if self._is_member(name)}

    def _is_member(self, name: str) -> bool:
        owned = names.parse(name)
        return owned is not None and owned.owner == self._owner and owned.key is not None

    async def clean(self, run_id: str) -> Evidence:
        """End what is left of a run; the evidence is what SkyPilot and the clouds then show."""

        def ours(name: str) -> bool:
            return records.of_run(name, self._owner, run_id)

        deadline = time.monotonic() + _PATIENCE_S
        asked: set[str] = set()
        while True:
            coming = await self._client.forget(ours)
            jobs, clusters = await self._left(ours)
            if not coming and not jobs and not clusters:
                return Evidence(True, "SkyPilot shows no job and no cluster of the run")
            if time.monotonic() > deadline:
                return Evidence(False, _listed(jobs, clusters) or "SkyPilot is still starting some")
            await self._end(jobs, clusters, asked)
            await self._board.pause()

    async def strays(self, active: Collection[str], runs: Iterable[str]) -> list[Stray]:
        """What is this launcher's and of no active run; `runs` are those whose marks it knows."""
        jobs, clusters = await self._left(self._stray(active))
        marks = {names.run_mark(run_id): run_id for run_id in runs}

        def stray(shown: str, name: str, status: str, place: Place | None) -> Stray:
            run_id = marks.get(records.mark_of(name), "")
            return Stray(shown, run_id, f"{status} at {place}" if place else status)

        found = [stray(f"job {j.job_id} {j.task}", j.task, j.status, j.place) for j in jobs]
        found += [stray(c.name, c.name, c.status, c.place) for c in clusters]
        return sorted(found, key=lambda each: each.name)

    def _stray(self, active: Collection[str]) -> Callable[[str], bool]:
        """Tells what is of no active run. Asked after each look: runs are begun meanwhile."""
        return lambda name: records.unowned(name, self._owner, active)

    async def reap(self, active: Collection[str]) -> list[str]:
        """End what is this launcher's and of no active run; says what of it is gone."""
        stray = self._stray(active)
        jobs, clusters = await self._left(stray)
        if not jobs and not clusters:
            return []
        await self._end(jobs, clusters, set())
        left_jobs, left_clusters = await self._left(stray)
        left = {*_names(left_jobs, left_clusters)}
        return [
            f"{name}: {'asked to end, and still there' if name in left else 'ended'}"
            for name in _names(jobs, clusters)
        ]

    async def _left(self, ours: Callable[[str], bool]) -> tuple[list[Job], list[Cluster]]:
        jobs = [
            j for j in await self._board.fresh() if not j.over and (ours(j.task) or ours(j.name))
        ]
        known = [c.name for c in await self._client.clusters() if ours(c.name)]
        # Only the clouds know whether the table is right.
        found = await self._client.clusters(certain=known) if known else []
        return jobs, [cluster for cluster in found if ours(cluster.name)]

    async def _end(self, jobs: list[Job], clusters: list[Cluster], asked: set[str]) -> None:
        """Ask once for each. SkyPilot ends the clusters of its jobs; what is left then is ours to
        end, such as one that its server was starting when it was stopped."""
        ids = sorted({job.job_id for job in jobs if f"job {job.job_id}" not in asked})
        asked |= {f"job {job_id}" for job_id in ids}
        await self._client.cancel(ids)
        if jobs:
            return
        for cluster in clusters:
            if cluster.name not in asked:
                asked.add(cluster.name)
                await self._client.down(cluster.name)


def _names(jobs: list[Job], clusters: list[Cluster]) -> list[str]:
    return sorted({f"job {job.job_id} {job.task}" for job in jobs} | {c.name for c in clusters})


def _listed(jobs: list[Job], clusters: list[Cluster]) -> str:
    shown = [f"job {job.job_id} {job.task} is {job.status}" for job in jobs]
    shown += [f"cluster {cluster.name} is {cluster.status}" for cluster in clusters]
    return "; ".join(shown)
