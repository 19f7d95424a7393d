"""One look at SkyPilot's queue for all who wait for something in it."""

import asyncio
import time

from services.launcher.backends.sky.ports import Client
from services.launcher.backends.sky.status import Job


class Board:
    """The managed jobs, asked for at most every `poll_s` seconds however many look."""

    def __init__(self, client: Client, poll_s: float) -> None:
        self.poll_s = poll_s
        self._client = client
        self._lock = asyncio.Lock()
        self._seen: list[Job] = []
        self._asked_at = float("-inf")

    async def jobs(self) -> list[Job]:
        """As of now or of the last `poll_s` seconds. Raises BackendUnreachable."""
        return await self._since(time.monotonic() - self.poll_s)

    async def fresh(self) -> list[Job]:
        """As of now: something was changed, perhaps while somebody else was being answered."""
        return await self._since(time.monotonic())

    async def _since(self, earliest: float) -> list[Job]:
        """What was asked for at that time or later."""
        async with self._lock:
            if self._asked_at < earliest:
                now = time.monotonic()
                self._seen = await self._client.jobs()
                self._asked_at = now
            return self._seen

    async def pause(self) -> None:
        await asyncio.sleep(self.poll_s)
