"""Publisher of committed events to observers, in order and at least once, across launcher
restarts."""

import asyncio
from collections.abc import Sequence

from flotilla_common.telemetry import log
from flotilla_launcher.control.background_loops import run_safely
from flotilla_launcher.ports import RunObserver
from flotilla_launcher.store.ledger import Ledger
from flotilla_launcher.store.row_codec import RunEvent, StoredRun

_LOOK_S = 0.5
_log = log.get_logger(__name__)


class EventPublisher:
    """Publisher of events. The ledger holds the queue and the position of the last published
    event."""

    def __init__(self, store: Ledger, observers: Sequence[RunObserver]) -> None:
        self._store = store
        self._observers = observers

    async def publish_forever(self) -> None:
        """Publish events until cancelled."""
        while True:
            await run_safely(self.publish_pending, "publishing events")
            await asyncio.sleep(_LOOK_S)

    async def publish_pending(self) -> None:
        """Publish all events that are not published yet."""
        for run_id, last in self._store.list_unpublished().items():
            stored = self._store.get_run(run_id)
            for event in self._store.list_events(run_id, last):
                if stored is not None and event.kind != "progress":
                    await self._notify_observers(stored, event)
                self._store.mark_published(run_id, event.number)

    async def _notify_observers(self, stored: StoredRun, event: RunEvent) -> None:
        for observer in self._observers:
            try:
                await observer(stored, event)
            # A run must not suffer from any defect of an observer.
            except Exception:  # noqa: BLE001
                _log.exception("an observer failed", run_id=stored.run.run_id, number=event.number)
