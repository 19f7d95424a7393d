"""Deletion of instances in the background until they are gone: closing always happens.

Includes the orphans that a dead gateway left in the journal. Orphaned replicas and machines are
the launcher's (`launcher/control/reaper.py`)."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.concurrency import cancel_tasks, wait_for_any, wait_for_event
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.limits.rate_gates import deletion_gate
from flotilla_env_gateway.limits.request_gates import Gate, Passage
from flotilla_env_gateway.ports import Backend, BackendError, Orphan

_LOG = get_logger(__name__)
_BASE_S, _CAP_S = 0.5, 10.0
# A server may request a pause of hours, during which the instance would keep running.
_LONGEST_S = 60.0


class InstanceDeleter:
    """Deletes instances in the background. `closed` counts this gateway's instances and
    `reclaimed` a predecessor's. `on_closed` is called once for each session whose instance
    is certainly gone.

    An instance that cannot be deleted stays in the journal and keeps its place in the
    limits, because it may still be running. The gateway's next start tries again."""

    def __init__(
        self,
        config: EnvGatewayConfig,
        journal: InstanceJournal,
        on_closed: Callable[[Session], None],
    ) -> None:
        self._config = config
        self._journal = journal
        self._on_closed = on_closed
        self._deletions = BackgroundTasks()
        self._ending = asyncio.Event()
        # By backend.
        self.deletions: defaultdict[str, Gate] = defaultdict(partial(deletion_gate, config))
        # Read before anything is opened: an instance opened later is not an orphan.
        self._orphans = journal.list_orphans()
        self.closed = 0
        self.reclaimed = 0

    @property
    def pending(self) -> int:
        return len(self._deletions.running)

    def delete_instance(self, session: Session) -> None:
        """Delete a session's instance, even one whose creation is still in progress."""
        self._deletions.start_task(self._delete_after_opening(session))

    def reclaim_orphans(self, backends: Mapping[str, Backend]) -> int:
        """Delete a predecessor's instances; return the number of those that may exist."""
        count = 0
        left, self._orphans = self._orphans, {}
        for name, orphans in left.items():
            backend = backends.get(name)
            if backend is None:
                _LOG.warning("orphans_of_unknown_backend", backend=name, instances=len(orphans))
                continue
            for orphan in orphans:
                self._deletions.start_task(self._reclaim_orphan(name, backend, orphan))
            count += len(orphans)
        return count

    async def wait_until_deleted(self, timeout_s: float) -> None:
        """Wait until everything is deleted, but not for permanently refused deletions, and at
        most `timeout_s` after the last deletion. The rest stays in the journal."""
        self._ending.set()
        while pending := set(self._deletions.running):
            if not await wait_for_any(pending, timeout_s):
                await cancel_tasks(pending)
                _LOG.warning("instances_left_open", instances=len(pending))
        self._ending.clear()

    async def _delete_after_opening(self, session: Session) -> None:
        if session.opener is not None:
            await asyncio.wait({session.opener})
        if session.journaled:
            episode_id = session.episode.episode_id
            if not await self._retry_until_gone(episode_id, lambda: self._delete_once(session)):
                return
            self.closed += 1
        self._on_closed(session)

    async def _delete_once(self, session: Session) -> None:
        if session.instance is None and not session.may_exist:
            return
        timeout_s = self._config.close_timeout_s
        async with self._hold_place(session.backend_name, session.run_id):
            if session.instance is not None:
                await session.instance.close(timeout_s=timeout_s)
            else:
                orphan = Orphan(session.episode.episode_id)
                await session.backend.reclaim_orphan(orphan, timeout_s=timeout_s)

    def _hold_place(self, backend_name: str, run_id: str) -> AbstractAsyncContextManager[Passage]:
        """Wait without a deadline for a place at the backend's deletion gate: other deletions
        never make one give up."""
        return self.deletions[backend_name].hold_place(run_id, math.inf)

    async def _reclaim_orphan(self, name: str, backend: Backend, orphan: Orphan) -> None:
        async def reclaim_once() -> None:
            async with self._hold_place(name, ""):
                await backend.reclaim_orphan(orphan, timeout_s=self._config.close_timeout_s)

        if await self._retry_until_gone(orphan.episode_id, reclaim_once):
            self.reclaimed += 1
            _LOG.info("orphan_closed", episode_id=orphan.episode_id)

    async def _retry_until_gone(
        self, episode_id: str, delete: Callable[[], Awaitable[None]]
    ) -> bool:
        """Retry a deletion until it succeeds. Return False if it is permanently refused while
        the gateway ends."""
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S)
        while True:
            try:
                await delete()
                self._journal.record_deleted(episode_id)
            except BackendError as error:
                _LOG.warning("close_failed", episode_id=episode_id, error=str(error))
                if error.invalid and self._ending.is_set():
                    _LOG.error("close_refused", episode_id=episode_id, error=str(error))
                    return False
                wait_s = backoff.next_wait_s(error.retry_after_s)
            except Exception:  # noqa: BLE001
                # A fault of ours, too, must not leave an instance running and its place taken.
                _LOG.exception("close_failed", episode_id=episode_id)
                wait_s = backoff.next_wait_s()
            else:
                return True
            await self._sleep_until_ending(min(wait_s, _LONGEST_S))

    async def _sleep_until_ending(self, seconds: float) -> None:
        """Sleep, but wake at once when the gateway begins to end, for one more attempt."""
        if self._ending.is_set():
            await asyncio.sleep(seconds)
            return
        await wait_for_event(self._ending, seconds)
