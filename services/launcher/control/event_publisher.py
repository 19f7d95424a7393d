"""Tells observers what was committed: in order, at least once, whatever becomes of launchers."""

import asyncio
from collections.abc import Sequence

from services.common import log
from services.launcher.control.background import unbroken
from services.launcher.ports import Observer
from services.launcher.store.ledger import Store
from services.launcher.store.records import Event, StoredRun

_LOOK_S = 0.5
_log = log.get_logger(__name__)


class Teller:
    """The ledger's events are the queue, and how far it has been told stands there too."""

    def __init__(self, store: Store, observers: Sequence[Observer]) -> None:
        self._store = store
        self._observers = observers

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await unbroken(self.tell, "telling observers")
            await asyncio.sleep(_LOOK_S)

    async def tell(self) -> None:
        """Tell all that is known by now."""
        for run_id, told in self._store.untold().items():
            stored = self._store.get(run_id)
            for event in self._store.events(run_id, told):
                if stored is not None and event.kind != "progress":
                    await self._tell_all(stored, event)
                self._store.tell(run_id, event.number)

    async def _tell_all(self, stored: StoredRun, event: Event) -> None:
        for observer in self._observers:
            try:
                await observer(stored, event)
            # Whatever an observer's defect is, a run must not suffer from it.
            except Exception:  # noqa: BLE001
                _log.exception("an observer failed", run_id=stored.run.run_id, number=event.number)
