"""What one run asks of its backend, written down before and after, as soon as the disk takes it."""

import asyncio
import sqlite3
from collections.abc import Callable
from typing import TypeVar

from services.common import log
from services.launcher.state import Key
from services.launcher.store.ledger import Store
from services.launcher.store.operations import OperationState

T = TypeVar("T")

_START, _CLEAN = "start", "clean"
_WRITE_AGAIN_S = 1.0
_log = log.get_logger(__name__)


class Intents:
    """The operations of a run in the ledger. Nothing is asked that could not be written down."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._operations = store.operations
        self._run_id = run_id

    def heard(self, key: Key) -> bool:
        """Whether somebody may have heard of this start, and answered nobody."""
        begun = self._operations.open(self._run_id, _START, label(key))
        return begun is not None and begun.state is OperationState.SENT

    async def mark(self, key: Key, state: OperationState, detail: str = "") -> None:
        """How far the start of a replica has come."""
        begun = self._operations.open(self._run_id, _START, label(key))
        if begun is not None:
            await self._insist(lambda: self._operations.mark(begun.number, state, detail))

    async def begin_clean(self) -> int:
        """The number of the look for remains that begins, or that a dead launcher began: it may
        not have seen the end of it."""
        begun = self._operations.open(self._run_id, _CLEAN, self._run_id)
        if begun is not None:
            return begun.number
        return await self._insist(
            lambda: self._operations.intend(self._run_id, _CLEAN, self._run_id)
        )

    async def conclude(self, number: int, success: bool, detail: str) -> None:
        await self._insist(lambda: self._operations.conclude(number, success, detail))

    async def _insist(self, write: Callable[[], T]) -> T:
        while True:
            try:
                return write()
            except sqlite3.Error as error:
                _log.error("the ledger cannot be written", run_id=self._run_id, error=str(error))
                await asyncio.sleep(_WRITE_AGAIN_S)


def label(key: Key) -> str:
    """`rollout-1`, as people and the ledger call it."""
    return f"{key[0]}-{key[1]}"
