"""A verifier with all that it may ask: its arguments, and the environment in its final state."""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from services.env_gateway.ports import (
    BackendError,
    CallFn,
    CallResult,
    Instance,
    QueryError,
    QueryFn,
    Rows,
    SqlValue,
    Submission,
    Verification,
)
from services.env_gateway.tools.retry_policy import Backoff
from services.env_gateway.verify.source_shape import VerifierFunction

_BASE_S, _CAP_S = 0.2, 5.0

T = TypeVar("T")


def verification(
    instance: Instance,
    submission: Submission,
    function: VerifierFunction,
    asking: "Asking",
    *,
    trusted: Collection[str],
) -> Verification:
    """Of the verifier that is submitted; `trusted` are digests."""
    source = submission.task.verifier or ""
    return Verification(
        source=source,
        run_id=submission.run_id,
        function=function.name,
        query=_query(instance, asking),
        snapshot=lambda db: asking.ask(lambda left: instance.snapshot(db, timeout_s=left)),
        arguments=_arguments(function, submission),
        call=_call(instance, submission.readable, asking),
        trusted=hashlib.sha256(source.encode()).hexdigest() in trusted,
    )


def _arguments(function: VerifierFunction, submission: Submission) -> dict[str, str | None]:
    arguments: dict[str, str | None] = {}
    if function.takes_final_answer:
        arguments["final_answer"] = submission.final_answer
    if function.takes_conversation:
        arguments["conversation"] = submission.conversation
    return arguments


def _query(instance: Instance, asking: "Asking") -> QueryFn:
    async def query(db: str, sql: str, args: Sequence[SqlValue]) -> Rows:
        return await asking.ask(lambda left: instance.query(db, sql, args, timeout_s=left))

    return query


def _call(instance: Instance, readable: frozenset[str], asking: "Asking") -> CallFn:
    async def call(name: str, arguments: Mapping[str, Any]) -> CallResult:
        # A verifier may run more than once, and on a server that others share.
        if name not in readable:
            raise QueryError(f"a verifier may call tools that only read, and {name!r} is none")
        return await asking.ask(lambda left: instance.call(name, arguments, timeout_s=left))

    return call


class Asking:
    """What a verifier asks of an environment. A refusal is waited out in the first half of the time
    for a run; later the run is given up and begins anew, lest it ends for want of time."""

    def __init__(self, until: float, timeout_s: float, rng: random.Random) -> None:
        self._until = until
        self._patient_until = min(_now() + timeout_s / 2, until)
        self._rng = rng

    async def ask(self, ask: Callable[[float], Awaitable[T]]) -> T:
        """Raises BackendError."""
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S, rng=self._rng)
        while True:
            try:
                return await ask(_left(self._until))
            except BackendError as error:
                wait_s = backoff.next(error.retry_after_s)
                if not error.refused or _now() + wait_s >= self._patient_until:
                    raise
            await asyncio.sleep(wait_s)


def _left(until: float) -> float:
    return max(0.001, until - _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
