"""Baseline of a verifier: the checks that pass on the untouched state, which earn no credit."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.domain.attempts import Grade
from flotilla_common.tasks.task_format import Task
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.ports import Verification

_LOG = get_logger(__name__)
_KEPT = 4096

RunVerifier = Callable[[Verification], Awaitable[Grade]]
_Key = tuple[bytes, str, str, str, str]


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    passed: frozenset[str] | None = None


class UntouchedBaseline:
    """Runs each verifier once on the seed of its data, as if that were the final state."""

    def __init__(self) -> None:
        self._entries: BoundedDict[_Key, _Entry] = BoundedDict(_KEPT)

    async def find_passing_checks(
        self, task: Task, verification: Verification, run: RunVerifier, *, until: float
    ) -> frozenset[str] | None:
        """Return the checks that pass. None means that the verifier could not be run by
        `until`; that is not cached. Attempts at one task wait for the first of them."""
        key = _make_key(task, verification)
        entry = self._entries[key] = self._entries.get(key) or _Entry()
        try:
            async with asyncio.timeout_at(until), entry.lock:
                if entry.passed is None:
                    entry.passed = await _grade_seed(verification, run)
        except TimeoutError:
            _LOG.warning("untouched_state_not_graded", task=task.key)
        return entry.passed


def _make_key(task: Task, verification: Verification) -> _Key:
    # An environment's verifier grades tasks that differ in their metadata.
    given = json.dumps(verification.arguments.get("metadata"))
    digest = hashlib.sha256(f"{given}\0{verification.source}".encode()).digest()
    return digest, task.env_key, task.env_version, task.data_key, task.data_version


async def _grade_seed(verification: Verification, run: RunVerifier) -> frozenset[str] | None:
    grade = await run(
        replace(
            verification,
            query=lambda db, sql, args: verification.query("seed", sql, args),
            snapshot=lambda db: verification.snapshot("seed"),
            # Tools show the current state.
            call=None,
            # The policy's answer may pass a check on its own.
            arguments={
                name: value if name == "metadata" else ""
                for name, value in verification.arguments.items()
            },
        )
    )
    if not grade.is_known:
        _LOG.warning("untouched_state_not_graded", reason=grade.reason, error=grade.detail)
        return None
    return frozenset(grade.checks_passed)
