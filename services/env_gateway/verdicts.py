"""Grades an episode with its task's verifier: who may run, how often, and until when."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from services.env_gateway.config import VerifiersConfig
from services.env_gateway.grading import (
    Grade,
    Reason,
    VerifierError,
    VerifierFunction,
    find_verifier,
    judge,
    no_grade,
    worth_repeating,
)
from services.env_gateway.ports import (
    Execution,
    Grader,
    Instance,
    QueryFn,
    Rows,
    SqlValue,
    Verification,
)
from services.env_gateway.retry import Backoff
from services.env_gateway.session import Session

_BASE_S, _CAP_S = 0.2, 5.0


def load_digests(path: Path) -> frozenset[str]:
    """The SHA-256 digests listed in a file as `sha256sum` writes it; none when it is missing."""
    if not path.exists():
        return frozenset()
    lines = path.read_text().splitlines()
    return frozenset(line.split()[0].lower() for line in lines if line.strip())


class VerifierRunner:
    """Runs only verifiers in `digests`, unless the configuration allows all."""

    def __init__(
        self,
        config: VerifiersConfig,
        grader: Grader,
        digests: frozenset[str],
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._grader = grader
        self._digests = digests
        self._rng = rng or random.Random()

    async def grade(
        self, session: Session, final_answer: str | None, conversation: str | None, timeout_s: float
    ) -> Grade:
        """Waits for the call in flight, so that the state is final. Never raises for what a
        verifier or an environment does."""
        until = min(_now() + timeout_s, session.episode.ends_at)
        source = session.episode.spec.task.verifier
        instance = session.instance
        if refusal := self._refusal(session, source):
            return refusal
        assert source is not None and instance is not None
        try:
            function = find_verifier(source)
        except VerifierError as error:
            return no_grade(Reason.EXECUTION_FAILED, str(error))
        verification = Verification(
            source=source,
            function=function.name,
            query=_query(instance, until),
            snapshot=lambda db: instance.snapshot(db, timeout_s=_left(until)),
            arguments=_arguments(function, final_answer, conversation),
        )
        try:
            async with asyncio.timeout_at(until), session.turn:
                if session.episode.tainted:
                    return _tainted()
                return await self._attempts(verification, until)
        except TimeoutError:
            return no_grade(Reason.TIMEOUT, f"no grade within {timeout_s:.1f} s")

    def _refusal(self, session: Session, source: str | None) -> Grade | None:
        if source is None:
            return no_grade(Reason.NO_VERIFIER, "the task has no verifier")
        if session.episode.lost or session.instance is None:
            return no_grade(Reason.INSTANCE_LOST, "the environment instance is gone")
        if session.episode.tainted:
            return _tainted()
        digest = hashlib.sha256(source.encode()).hexdigest()
        if not self._config.unsafe_local_verifiers and digest not in self._digests:
            detail = (
                f"the verifier (SHA-256 {digest}) is not listed in {self._config.digests}; list it "
                f"there, or set env_gateway.verifiers.unsafe_local_verifiers = true to run any"
            )
            return no_grade(Reason.EXECUTION_FAILED, detail)
        return None

    async def _attempts(self, verification: Verification, until: float) -> Grade:
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S, rng=self._rng)
        for attempt in range(1, self._config.attempts + 1):
            timeout_s = min(self._config.timeout_s, _left(until))
            execution = await self._grader.execute(verification, timeout_s=timeout_s)
            wait_s = backoff.next()
            last = attempt == self._config.attempts or wait_s >= _left(until)
            if last or not worth_repeating(execution):
                return judge(execution, attempts=attempt)
            await asyncio.sleep(wait_s)
        return judge(Execution(error="no attempt was made"), attempts=0)


def _arguments(
    function: VerifierFunction, final_answer: str | None, conversation: str | None
) -> dict[str, str | None]:
    arguments: dict[str, str | None] = {}
    if function.takes_final_answer:
        arguments["final_answer"] = final_answer
    if function.takes_conversation:
        arguments["conversation"] = conversation
    return arguments


def _tainted() -> Grade:
    return no_grade(
        Reason.TAINTED, "a tool call may or may not have been executed; the final state is unknown"
    )


def _query(instance: Instance, until: float) -> QueryFn:
    async def query(db: str, sql: str, args: Sequence[SqlValue]) -> Rows:
        return await instance.query(db, sql, args, timeout_s=_left(until))

    return query


def _left(until: float) -> float:
    return max(0.001, until - _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
