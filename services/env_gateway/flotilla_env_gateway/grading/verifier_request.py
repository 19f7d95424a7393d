"""A verifier with everything it may query: its arguments, and the environment in its final
state."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_env_gateway.grading.passed_text import PassedText
from flotilla_env_gateway.grading.trusted_verifiers import is_trusted
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.ports import (
    BackendError,
    CallFn,
    CallResult,
    Instance,
    QueryError,
    QueryFn,
    Rows,
    SnapshotFn,
    SqlValue,
    Submission,
    Verification,
)
from flotilla_env_gateway.verify.verifier_source import VerifierFunction

_BASE_S, _CAP_S = 0.2, 5.0

T = TypeVar("T")


def make_verification(
    instance: Instance,
    submission: Submission,
    function: VerifierFunction,
    retrier: "RefusalRetrier",
    *,
    digests: Collection[str],
    passed_text: PassedText,
) -> Verification:
    """Build the run of the submission's verifier; those with one of `digests`, and functions that
    need packages, are trusted. `passed_text` notes what tools show it."""
    source = submission.task.verifier or ""
    return Verification(
        source=source,
        run_id=submission.run_id,
        function=function.name,
        query=_make_query(instance, retrier),
        snapshot=_make_snapshot(instance, retrier),
        arguments=function.choose_arguments(
            submission.final_answer, submission.conversation, submission.task.metadata
        ),
        call=_make_call(instance, submission.readable, retrier, passed_text),
        trusted=function.packages or is_trusted(source, digests),
        packages=function.packages,
    )


def _make_query(instance: Instance, retrier: "RefusalRetrier") -> QueryFn:
    async def ask_database(db: str, sql: str, args: Sequence[SqlValue]) -> Rows:
        return await retrier.send_patiently(
            lambda left: instance.query_database(db, sql, args, timeout_s=left)
        )

    return ask_database


def _make_snapshot(instance: Instance, retrier: "RefusalRetrier") -> SnapshotFn:
    async def copy_database(db: str) -> bytes | None:
        return await retrier.send_patiently(
            lambda left: instance.snapshot_database(db, timeout_s=left)
        )

    return copy_database


def _make_call(
    instance: Instance, readable: frozenset[str], retrier: "RefusalRetrier", passed_text: PassedText
) -> CallFn:
    async def call_readable_tool(name: str, arguments: Mapping[str, Any]) -> CallResult:
        # A verifier may run more than once, and on a server that others share.
        if name not in readable:
            raise QueryError(f"a verifier may call tools that only read, and {name!r} is none")
        result = await retrier.send_patiently(
            lambda left: instance.call_tool(name, arguments, timeout_s=left)
        )
        await passed_text.note_parts(result.parts)
        return result

    return call_readable_tool


class RefusalRetrier:
    """Sends a verifier's requests to an environment and retries refused ones during the first
    half of a run's time. After that the run is abandoned and restarted, so that it does not
    fail for lack of time."""

    def __init__(self, until: float, timeout_s: float) -> None:
        self._until = until
        self._patient_until = min(loop_time() + timeout_s / 2, until)

    async def send_patiently(self, send: Callable[[float], Awaitable[T]]) -> T:
        """Send one request, retrying refusals. Raises BackendError."""
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S)
        while True:
            try:
                return await send(seconds_left(self._until))
            except BackendError as error:
                wait_s = backoff.next_wait_s(error.retry_after_s)
                if not error.is_refusal or loop_time() + wait_s >= self._patient_until:
                    raise
            await asyncio.sleep(wait_s)
