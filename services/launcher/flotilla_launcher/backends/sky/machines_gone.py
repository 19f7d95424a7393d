"""Proof that machines are gone: they are ended at SkyPilot until it and the clouds show none."""

import asyncio
import time
from collections.abc import Callable, Iterable

from flotilla_launcher.backends.ports import CleanupEvidence, OrphanResource
from flotilla_launcher.backends.sky import names, orphan_names
from flotilla_launcher.backends.sky.ports import SkyPilotApi
from flotilla_launcher.backends.sky.status import Cluster

# Time that SkyPilot may take to end machines before leftovers count.
_PATIENCE_S = 90.0


class SkyCleaner:
    """Cleaner of one launcher's clusters, identified by name."""

    def __init__(self, client: SkyPilotApi, poll_s: float, owner: str) -> None:
        self._client = client
        self._poll_s = poll_s
        self._owner = owner

    async def list_members(self) -> list[str]:
        """List the names of this launcher's clusters."""
        owned = [
            (each.name, names.parse_name(each.name)) for each in await self._client.list_clusters()
        ]
        return [name for name, its in owned if its is not None and its.owner == self._owner]

    async def clean_run(self, is_ours: Callable[[str], bool]) -> CleanupEvidence:
        """End everything left of a run, identified by `is_ours`; return the state at SkyPilot and
        the clouds as evidence."""
        deadline = time.monotonic() + _PATIENCE_S
        requested: set[str] = set()
        while True:
            coming = await self._client.cancel_pending(is_ours)
            clusters = await self._find_left(is_ours)
            if not coming and not clusters:
                return CleanupEvidence(True, "SkyPilot shows no cluster of the run")
            if time.monotonic() > deadline:
                left = "; ".join(f"cluster {each.name} is {each.status}" for each in clusters)
                return CleanupEvidence(False, left or "SkyPilot is still starting some")
            for cluster in clusters:
                if cluster.name not in requested:
                    requested.add(cluster.name)
                    await self._client.tear_down_cluster(cluster.name)
            await asyncio.sleep(self._poll_s)

    async def list_orphans(
        self, is_orphan: Callable[[str], bool], runs: Iterable[str]
    ) -> list[OrphanResource]:
        """List the clusters with orphans' names. `runs` are the runs whose marks can be
        resolved."""
        marks = {names.run_mark(self._owner, run_id): run_id for run_id in runs}
        found = [
            OrphanResource(
                each.name,
                marks.get(orphan_names.run_mark_of(each.name), ""),
                f"{each.status} at {each.place}" if each.place else each.status,
            )
            for each in await self._find_left(is_orphan)
        ]
        return sorted(found, key=lambda each: each.name)

    async def end_orphans(self, is_orphan: Callable[[str], bool]) -> list[str]:
        """End the clusters with orphans' names; report which are gone."""
        clusters = sorted(each.name for each in await self._find_left(is_orphan))
        if not clusters:
            return []
        for name in clusters:
            await self._client.tear_down_cluster(name)
        left = {each.name for each in await self._find_left(is_orphan)}
        return [
            f"{name}: {'end requested, still there' if name in left else 'ended'}"
            for name in clusters
        ]

    async def _find_left(self, ours: Callable[[str], bool]) -> list[Cluster]:
        known = [each.name for each in await self._client.list_clusters() if ours(each.name)]
        # Only the clouds can confirm SkyPilot's table.
        found = await self._client.list_clusters(certain=known) if known else []
        return [cluster for cluster in found if ours(cluster.name)]
