"""SkyPilot's queue of managed jobs, read once for all who wait for something in it."""

import asyncio
import time

from services.launcher.backends.sky.ports import SkyPilotApi
from services.launcher.backends.sky.status import Job


class JobQueue:
    """The managed jobs, queried at most every `poll_s` seconds for any number of readers."""

    def __init__(self, client: SkyPilotApi, poll_s: float) -> None:
        self.poll_s = poll_s
        self._client = client
        self._lock = asyncio.Lock()
        self._seen: list[Job] = []
        self._queried_at = float("-inf")

    async def recent_jobs(self) -> list[Job]:
        """Return the jobs as of now or of the last `poll_s` seconds. Raises BackendUnreachable."""
        return await self._jobs_since(time.monotonic() - self.poll_s)

    async def fresh_jobs(self) -> list[Job]:
        """Return the jobs as of now, after a change that an answer under way may have missed."""
        return await self._jobs_since(time.monotonic())

    async def _jobs_since(self, earliest: float) -> list[Job]:
        async with self._lock:
            if self._queried_at < earliest:
                now = time.monotonic()
                self._seen = await self._client.list_jobs()
                self._queried_at = now
            return self._seen

    async def pause_between_polls(self) -> None:
        await asyncio.sleep(self.poll_s)
