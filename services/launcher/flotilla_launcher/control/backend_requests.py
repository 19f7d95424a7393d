"""Record of one run's requests to its backend, before and after each; retried while the disk
is full."""

import asyncio
import sqlite3
from collections.abc import Callable
from typing import TypeVar

from flotilla_common.telemetry import log
from flotilla_launcher.state import ReplicaKey
from flotilla_launcher.store.ledger import Ledger
from flotilla_launcher.store.operation_log import OperationState

T = TypeVar("T")

_START, _CLEAN = "start", "clean"
_WRITE_AGAIN_S = 1.0
_log = log.get_logger(__name__)


class BackendRequests:
    """Operations of a run in the ledger. A request is sent only after it is recorded."""

    def __init__(self, store: Ledger, run_id: str) -> None:
        self._store = store
        self._operations = store.operations
        self._run_id = run_id

    def may_have_been_heard(self, key: ReplicaKey) -> bool:
        """Return whether the backend may have received this start without answering."""
        begun = self._operations.find_open(self._run_id, _START, replica_label(key))
        return begun is not None and begun.state is OperationState.SENT

    async def mark_start(self, key: ReplicaKey, state: OperationState, detail: str = "") -> None:
        """Record the progress of the start of a replica."""
        begun = self._operations.find_open(self._run_id, _START, replica_label(key))
        if begun is not None:
            await self._write_until_done(
                lambda: self._operations.mark_state(begun.number, state, detail)
            )

    async def begin_clean(self) -> int:
        """Begin a cleanup and return its number. An open one of a dead launcher is reused."""
        begun = self._operations.find_open(self._run_id, _CLEAN, self._run_id)
        if begun is not None:
            return begun.number
        return await self._write_until_done(
            lambda: self._operations.record_intent(self._run_id, _CLEAN, self._run_id)
        )

    async def conclude_clean(self, number: int, success: bool, detail: str) -> None:
        state = OperationState.DONE if success else OperationState.FAILED
        await self._write_until_done(lambda: self._operations.mark_state(number, state, detail))

    async def _write_until_done(self, write: Callable[[], T]) -> T:
        while True:
            try:
                with self._store.transaction():
                    return write()
            except sqlite3.Error as error:
                _log.error("cannot write the ledger", run_id=self._run_id, error=str(error))
                await asyncio.sleep(_WRITE_AGAIN_S)


def replica_label(key: ReplicaKey) -> str:
    """Return the label of a replica, such as `rollout-1`, as people and the ledger call it."""
    return f"{key[0]}-{key[1]}"
