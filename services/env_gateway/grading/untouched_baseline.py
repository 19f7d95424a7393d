"""Which checks of a verifier pass before anything was done: credit for them is no credit."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from services.common.log import get_logger
from services.env_gateway.episodes.task_format import Task
from services.env_gateway.grading.verdict import Grade
from services.env_gateway.ports import Verification

_LOG = get_logger(__name__)
_KEPT = 4096

Run = Callable[[Verification], Awaitable[Grade]]
_Key = tuple[bytes, str, str, str, str]


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    passed: frozenset[str] | None = None


class Untouched:
    """Runs each verifier once on the seed of its data, as if that were the final state."""

    def __init__(self) -> None:
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()

    async def passed(
        self, task: Task, verification: Verification, run: Run, *, until: float
    ) -> frozenset[str] | None:
        """The checks that pass; None when the verifier could not be run by then, which is not
        remembered. Attempts at one task wait for the first of them."""
        entry = self._entry(_key(task, verification))
        try:
            async with asyncio.timeout_at(until), entry.lock:
                if entry.passed is None:
                    entry.passed = await _measure(verification, run)
        except TimeoutError:
            _LOG.warning("untouched_state_not_graded", task=task.key)
        return entry.passed

    def _entry(self, key: _Key) -> _Entry:
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        if len(self._entries) > _KEPT:
            self._entries.popitem(last=False)
        return entry


def _key(task: Task, verification: Verification) -> _Key:
    digest = hashlib.sha256(verification.source.encode()).digest()
    return digest, task.env_key, task.env_version, task.data_key, task.data_version


async def _measure(verification: Verification, run: Run) -> frozenset[str] | None:
    grade = await run(
        replace(
            verification,
            query=lambda db, sql, args: verification.query("seed", sql, args),
            snapshot=lambda db: verification.snapshot("seed"),
            # Tools show the state as it is now.
            call=None,
            # An answer that was given may pass a check by itself.
            arguments=dict.fromkeys(verification.arguments, ""),
        )
    )
    if not grade.known:
        _LOG.warning("untouched_state_not_graded", reason=grade.reason, error=grade.detail)
        return None
    return frozenset(grade.checks_passed)
