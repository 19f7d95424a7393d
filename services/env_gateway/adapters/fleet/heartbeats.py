"""Tells Fleet that instances are still wanted: one task for all of them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from services.common.log import get_logger
from services.env_gateway.ports import BackendError

_LOG = get_logger(__name__)
_AT_ONCE = 64

Beat = Callable[[], Awaitable[None]]


class Heartbeats:
    """Beats for each watched instance every `period_s`, until it is forgotten or is gone."""

    def __init__(self, *, period_s: float) -> None:
        self._period_s = period_s
        self._beats: dict[str, Beat] = {}
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    def watch(self, instance_id: str, beat: Beat) -> None:
        """`beat` raises BackendError when it fails, `lost` when there is no instance any more."""
        self._beats[instance_id] = beat
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def forget(self, instance_id: str) -> None:
        self._beats.pop(instance_id, None)

    async def close(self) -> None:
        self._beats.clear()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await asyncio.gather(*(self._beat(name) for name in list(self._beats)))

    async def _beat(self, instance_id: str) -> None:
        async with self._at_once:
            beat = self._beats.get(instance_id)
            if beat is None:
                return
            try:
                await beat()
            except BackendError as error:
                _LOG.warning("heartbeat_failed", instance=instance_id, error=str(error))
                if error.lost:
                    self.forget(instance_id)
            except Exception:  # noqa: BLE001
                # The loop must go on, or all other instances would end.
                _LOG.exception("heartbeat_failed", instance=instance_id)
