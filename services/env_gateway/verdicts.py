"""Grades an episode with its task's verifier: who may run, how often, and until when."""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.common.log import get_logger
from services.env_gateway.config import EnvGatewayConfig, VerifiersConfig
from services.env_gateway.grading import (
    Grade,
    Reason,
    VerifierError,
    VerifierFunction,
    find_verifier,
    judge,
    no_grade,
    partial_reward,
    worth_repeating,
)
from services.env_gateway.ports import (
    BackendError,
    CallFn,
    CallResult,
    Execution,
    Grader,
    Instance,
    QueryError,
    QueryFn,
    Rows,
    SqlValue,
    Submission,
    Verification,
)
from services.env_gateway.retry import Backoff
from services.env_gateway.session import Session
from services.env_gateway.untouched import Untouched

_LOG = get_logger(__name__)
_BASE_S, _CAP_S = 0.2, 5.0
_MARGIN_S = 0.5


def load_digests(path: Path) -> frozenset[str]:
    """The SHA-256 digests listed in a file as `sha256sum` writes it; none when it is missing."""
    if not path.exists():
        return frozenset()
    lines = path.read_text().splitlines()
    return frozenset(line.split()[0].lower() for line in lines if line.strip())


def load_verifiers(config: EnvGatewayConfig) -> dict[str, str]:
    """Sources of `environments.KEY.verifier`. Raises ConfigError naming a file that is not there or
    holds no verifier."""
    sources: dict[str, str] = {}
    for env_key, environment in config.environments.items():
        if environment.verifier is None:
            continue
        try:
            sources[env_key] = environment.verifier.read_text()
            find_verifier(sources[env_key])
        except (OSError, ValueError) as error:
            where = f"env_gateway.environments.{env_key}.verifier"
            raise ConfigError(f"{where}: {environment.verifier}: {error}") from error
    return sources


class _NoVerifierError(VerifierError):
    """There is no source at all."""


class VerifierRunner:
    """Verifiers in `digests` are trusted; the grader decides where others may run."""

    def __init__(
        self,
        config: VerifiersConfig,
        grader: Grader,
        digests: frozenset[str],
        rng: random.Random | None = None,
        by_env: Mapping[str, str] | None = None,
    ) -> None:
        self._by_env = by_env or {}
        self._config = config
        self._grader = grader
        self._digests = digests
        self._untouched = Untouched()
        self._rng = rng or random.Random()

    async def grade(self, session: Session, submission: Submission, timeout_s: float) -> Grade:
        """Waits for the call in flight, so that the state is final. Never raises for what a
        verifier or an environment does."""
        until = min(_now() + timeout_s, session.episode.ends_at)
        submission = self._completed(session, submission)
        try:
            async with asyncio.timeout_at(until), session.turn:
                return await self._grade(session, submission, until)
        except TimeoutError:
            return no_grade(Reason.TIMEOUT, f"no grade within {timeout_s:.1f} s")
        except Exception as error:  # noqa: BLE001
            # An answer that no adapter foresaw. Whoever waits must hear of it, and may ask again.
            _LOG.exception("grade_failed", episode_id=session.episode.episode_id)
            return no_grade(Reason.EXECUTION_FAILED, f"the gateway failed: {error!r}"[:500])

    def _completed(self, session: Session, submission: Submission) -> Submission:
        """With the environment's verifier for a task that brings none."""
        task = submission.task
        readable = frozenset(tool.name for tool in session.tools.values() if tool.read_only)
        verifier = task.verifier or self._by_env.get(task.env_key)
        return replace(submission, task=replace(task, verifier=verifier), readable=readable)

    async def _grade(self, session: Session, submission: Submission, until: float) -> Grade:
        instance = session.instance
        if session.episode.lost or instance is None:
            return no_grade(Reason.INSTANCE_LOST, "the environment instance is gone")
        if session.episode.tainted:
            return _tainted()
        first = await self._ask(instance, submission, until)
        if first is not None:
            ask = lambda: self._ask(instance, submission, until)  # noqa: E731
            grade = await self._attempts(ask, until, first=first)
            return await self._with_partial(grade, instance, submission, until)
        try:
            verification = self._verification(instance, submission, until)
        except _NoVerifierError:
            return no_grade(Reason.NO_VERIFIER, "the task has no verifier")
        except VerifierError as error:
            return no_grade(Reason.EXECUTION_FAILED, str(error))
        grade = await self._attempts(lambda: self._execute(verification, until), until)
        return await self._with_partial(grade, instance, submission, until)

    def _verification(
        self, instance: Instance, submission: Submission, until: float
    ) -> Verification:
        """Raises VerifierError."""
        source = submission.task.verifier
        if source is None:
            raise _NoVerifierError("the task has no verifier")
        function = find_verifier(source)
        return Verification(
            source=source,
            function=function.name,
            query=_query(instance, until),
            snapshot=lambda db: instance.snapshot(db, timeout_s=_left(until)),
            arguments=_arguments(function, submission),
            call=_call(instance, submission.readable, until),
            trusted=hashlib.sha256(source.encode()).hexdigest() in self._digests,
        )

    async def _with_partial(
        self, grade: Grade, instance: Instance, submission: Submission, until: float
    ) -> Grade:
        """The grade with the partial reward that the configuration asks for."""
        if self._config.partial == "off" or not grade.known:
            return replace(grade, partial_reward=None)
        if self._config.partial == "earned" and grade.checks_failed:
            share = await self._earned(grade, instance, submission, until)
            grade = replace(grade, partial_reward=share)
        share = grade.partial_reward
        if self._config.partial_is_reward and grade.reward == 0 and share is not None and share < 1:
            return replace(grade, reward=share)
        return grade

    async def _earned(
        self, grade: Grade, instance: Instance, submission: Submission, until: float
    ) -> float | None:
        try:
            verification = self._verification(instance, submission, until)
        except VerifierError:
            return None
        free = await self._untouched.passed(
            submission.task,
            verification,
            lambda run: self._execute(run, until),
            # The grade itself is known, and must not be lost for this.
            until=until - _MARGIN_S,
        )
        if free is None:
            return None
        return partial_reward(grade.checks_passed, grade.checks_failed, free=free)

    async def _execute(self, verification: Verification, until: float) -> Execution:
        timeout_s = min(self._config.timeout_s, _left(until))
        return await self._grader.execute(verification, timeout_s=timeout_s)

    async def _ask(
        self, instance: Instance, submission: Submission, until: float
    ) -> Execution | None:
        """The backend's own grade; None when it has none to give."""
        timeout_s = min(self._config.timeout_s, _left(until))
        try:
            return await instance.grade(submission, timeout_s=timeout_s)
        except BackendError as error:
            retryable = not (error.lost or error.invalid)
            return Execution(error=str(error), instance_lost=error.lost, retryable=retryable)

    async def _attempts(
        self,
        execute: Callable[[], Awaitable[Execution | None]],
        until: float,
        *,
        first: Execution | None = None,
    ) -> Grade:
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S, rng=self._rng)
        execution = first
        for attempt in range(1, self._config.attempts + 1):
            execution = execution or await execute()
            assert execution is not None, "a backend that graded once grades again"
            wait_s = backoff.next()
            last = attempt == self._config.attempts or wait_s >= _left(until)
            if last or not worth_repeating(execution):
                return judge(execution, attempts=attempt)
            await asyncio.sleep(wait_s)
            execution = None
        return judge(Execution(error="no attempt was made"), attempts=0)


def _arguments(function: VerifierFunction, submission: Submission) -> dict[str, str | None]:
    arguments: dict[str, str | None] = {}
    if function.takes_final_answer:
        arguments["final_answer"] = submission.final_answer
    if function.takes_conversation:
        arguments["conversation"] = submission.conversation
    return arguments


def _tainted() -> Grade:
    return no_grade(
        Reason.TAINTED, "a tool call may or may not have been executed; the final state is unknown"
    )


def _query(instance: Instance, until: float) -> QueryFn:
    async def query(db: str, sql: str, args: Sequence[SqlValue]) -> Rows:
        return await instance.query(db, sql, args, timeout_s=_left(until))

    return query


def _call(instance: Instance, readable: frozenset[str], until: float) -> CallFn:
    async def call(name: str, arguments: Mapping[str, Any]) -> CallResult:
        # A verifier may run more than once, and on a server that others share.
        if name not in readable:
            raise QueryError(f"a verifier may call tools that only read, and {name!r} is none")
        return await instance.call(name, arguments, timeout_s=_left(until))

    return call


def _left(until: float) -> float:
    return max(0.001, until - _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
