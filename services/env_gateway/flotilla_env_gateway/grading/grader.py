"""Grading of a final state with its task's verifier: trust, repetition and deadlines."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.tasks.task_format import Task
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.parsing import run_aside
from flotilla_env_gateway.config.gateway import VerifiersConfig
from flotilla_env_gateway.grading.passed_text import PassedText
from flotilla_env_gateway.grading.printed_checks import prints_checks
from flotilla_env_gateway.grading.untouched_baseline import UntouchedBaseline
from flotilla_env_gateway.grading.verdict import (
    cap_partial_reward,
    compute_partial_reward,
    judge_execution,
    no_grade,
)
from flotilla_env_gateway.grading.verifier_functions import NamedVerifier
from flotilla_env_gateway.grading.verifier_request import RefusalRetrier, make_verification
from flotilla_env_gateway.grading.world_search import search_of_world
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.limits.request_gates import Gate, NoPlaceError
from flotilla_env_gateway.ports import (
    BackendError,
    Execution,
    Grader,
    Instance,
    Submission,
    Verification,
)
from flotilla_env_gateway.verify.verifier_finder import VerifierFinder
from flotilla_env_gateway.verify.verifier_source import VerifierError, VerifierFunction

_LOG = get_logger(__name__)
_BASE_S, _CAP_S = 0.2, 5.0
_MARGIN_S = 0.5
_PRINTED_ONLY = (
    "the verifier only prints its checks, and partial_is_reward needs those that it returns: let "
    'it return {"score": ..., "passed": [...], "failed": [...]}, or set '
    "env_gateway.verifiers.partial_is_reward = false"
)


@dataclass(slots=True)
class GradingJob:
    """The final state of one episode, to be graded until a deadline. `refusal` is the backend's
    last refusal while no run has begun, `refused_s` the time that it took."""

    episode_id: str
    instance: Instance
    submission: Submission
    passed_text: PassedText
    gate: Gate
    until: float
    refusal: str = ""
    refused_s: float = 0.0
    world_searched: bool = False

    @asynccontextmanager
    async def hold_place(self) -> AsyncGenerator[None]:
        """Hold a place among the runs in flight. Raises NoPlaceError if none is free in time: with
        less left than the last refusal took, a run that is refused would be cut off instead."""
        async with self.gate.hold_place(
            self.submission.run_id,
            self.until,
            kind=self.submission.task.key,
            instance_id=self.instance.instance_id,
            returning=bool(self.refusal),
        ):
            begun = loop_time()
            if self.refusal and self.until - begun <= self.refused_s:
                raise NoPlaceError
            try:
                yield
            except BackendError:
                self.refused_s = loop_time() - begun
                raise


class NoVerifierError(VerifierError):
    """Error for a task without any verifier source."""


class VerifierRunner:
    """Runs verifiers and grades with them. Those in `digests` are trusted; the grader decides
    where others may run. `by_env` has the sources of environments' verifiers, and `functions` those
    among them that are named in a module."""

    def __init__(
        self,
        config: VerifiersConfig,
        grader: Grader,
        digests: frozenset[str],
        by_env: Mapping[str, str] | None = None,
        functions: Mapping[str, NamedVerifier] | None = None,
    ) -> None:
        self._functions = functions or {}
        self._by_env = {
            **(by_env or {}),
            **{env_key: named.source for env_key, named in self._functions.items()},
        }
        self._config = config
        self._grader = grader
        self._digests = digests
        self._untouched = UntouchedBaseline()
        self._finder = VerifierFinder()

    async def grade_final_state(self, job: GradingJob) -> Grade:
        """Grade an episode in its final state. Each run waits at the job's gate. Raises nothing
        for the behaviour of a verifier."""
        submission = job.submission
        for text in (submission.final_answer or "", submission.conversation or ""):
            await run_aside(len(text), partial(job.passed_text.note_text, text))
        try:
            grade = await self._run_until_settled(job, lambda: self._run_verifier(job))
        except NoVerifierError:
            return no_grade(NoGradeReason.NO_VERIFIER, "the task has no verifier")
        except VerifierError as error:
            detail = f"of task {submission.task.key!r}, {error}"
            return replace(no_grade(NoGradeReason.EXECUTION_FAILED, detail), verifier_fault=True)
        if grade.suspicion:
            _LOG.warning(
                "reward_hacking_suspected",
                episode_id=job.episode_id,
                task=submission.task.key,
                printed=grade.suspicion,
            )
        return await self._add_partial_reward(grade, job)

    async def reads_conversation(self, task: Task) -> bool:
        """Return True if the task's verifier takes the conversation."""
        source = task.verifier or self._by_env.get(task.env_key)
        if source is None:
            return False
        try:
            return (await self._find_function(task.env_key, source)).takes_conversation
        except VerifierError:
            return False

    def add_environment_verifier(self, submission: Submission) -> Submission:
        """Return the submission, with the environment's verifier if its task has none."""
        task = submission.task
        verifier = task.verifier or self._by_env.get(task.env_key)
        return replace(submission, task=replace(task, verifier=verifier))

    async def _find_function(self, env_key: str, source: str) -> VerifierFunction:
        named = self._functions.get(env_key)
        if named is not None and named.source == source:
            return named.function
        return await self._finder.find_function(source)

    async def _run_verifier(self, job: GradingJob) -> Execution:
        """Run the verifier once, in the environment or in the gateway. Raises BackendError and
        VerifierError."""
        async with job.hold_place():
            timeout_s = min(self._config.timeout_s, seconds_left(job.until))
            execution = await job.instance.grade_submission(job.submission, timeout_s=timeout_s)
            if execution is not None:
                return execution
            verification = await self._prepare_verification(job)
            return await self._execute_here(verification, job.until)

    async def _run_until_settled(
        self, job: GradingJob, run: Callable[[], Awaitable[Execution]]
    ) -> Grade:
        """Run the verifier until its result is final or time is up; return the last run's
        grade with the number of runs. Runs refused before they began are not counted and
        are retried while time remains."""
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S)
        attempts = 0
        while True:
            error = None
            try:
                execution = await run()
            except BackendError as failure:
                error = failure
                execution = _failed_execution(failure)
            refused = error is not None and error.is_refusal
            attempts += not refused
            retry_after_s = error.retry_after_s if error else None
            if error is not None and error.kind == "throttled":
                # The gate keeps the pace of all.
                wait_s = retry_after_s or 0.0
            else:
                wait_s = backoff.next_wait_s(retry_after_s)
            grade = await self._judge_run(execution, attempts, job)
            repeatable = execution.retryable or grade.reason is NoGradeReason.JUDGE_ERROR
            if not repeatable or attempts >= self._config.attempts:
                return grade
            if wait_s >= seconds_left(job.until):
                return replace(grade, reason=NoGradeReason.TIMEOUT) if refused else grade
            job.refusal = str(error) if refused else ""
            await asyncio.sleep(wait_s)

    async def _judge_run(self, execution: Execution, attempts: int, job: GradingJob) -> Grade:
        """Turn a run into a grade."""
        passed_text = job.passed_text
        grade = await _judge_aside(execution, attempts, phrase_passed=passed_text.has_phrase)
        if grade.reason is NoGradeReason.JUDGE_ERROR and await self._is_phrase_in_world(job):
            grade = await _judge_aside(execution, attempts, phrase_passed=True)
        source = job.submission.task.verifier or ""
        wants_checks = self._config.partial_is_reward and execution.report is None
        if grade.is_known and wants_checks and prints_checks(source):
            return no_grade(NoGradeReason.EXECUTION_FAILED, _PRINTED_ONLY)
        return grade

    async def _is_phrase_in_world(self, job: GradingJob) -> bool:
        """Search the world's database, once for a grade; return False if that is impossible."""
        if not job.world_searched:
            job.world_searched = True
            try:
                search = search_of_world(await self._prepare_verification(job))
                async with job.hold_place():
                    execution = await self._execute_here(search, job.until)
            except (BackendError, VerifierError):
                return False
            job.passed_text.has_phrase = execution.result == 1
        return job.passed_text.has_phrase

    async def _prepare_verification(self, job: GradingJob) -> Verification:
        """Prepare the submission's verifier to run in the gateway. Raises VerifierError."""
        source = job.submission.task.verifier
        if source is None:
            raise NoVerifierError("the task has no verifier")
        function = await self._find_function(job.submission.task.env_key, source)
        retrier = RefusalRetrier(job.until, self._config.timeout_s)
        return make_verification(
            job.instance,
            job.submission,
            function,
            retrier,
            digests=self._digests,
            passed_text=job.passed_text,
        )

    async def _add_partial_reward(self, grade: Grade, job: GradingJob) -> Grade:
        """Return the grade with the partial reward that the configuration requests."""
        if self._config.partial == "off" or grade.reward is None:
            return replace(grade, partial_reward=None)
        share, by_itself = grade.partial_reward, self._config.partial == "earned"
        if by_itself and grade.checks_failed and share is not None:
            share = await self._earned_share(grade, grade.reward, job)
            grade = replace(grade, partial_reward=share)
        if self._config.partial_is_reward and grade.reward == 0 and share is not None:
            return replace(grade, reward=share)
        return grade

    async def _earned_share(self, grade: Grade, reward: float, job: GradingJob) -> float | None:
        try:
            verification = await self._prepare_verification(job)
        except VerifierError:
            return None

        async def run_untouched(untouched: Verification) -> Execution:
            async with job.hold_place():
                return await self._execute_here(untouched, job.until)

        async def grade_untouched(untouched: Verification) -> Grade:
            return await self._run_until_settled(job, lambda: run_untouched(untouched))

        # The grade itself is known, and must not be lost because of this.
        until = job.until - _MARGIN_S
        task = job.submission.task
        free = await self._untouched.find_passing_checks(
            task, verification, grade_untouched, until=until
        )
        if free is None:
            return None
        return cap_partial_reward(
            compute_partial_reward(grade.checks_passed, grade.checks_failed, free=free), reward
        )

    async def _execute_here(self, verification: Verification, until: float) -> Execution:
        timeout_s = min(self._config.timeout_s, seconds_left(until))
        return await self._grader.run_verifier(verification, timeout_s=timeout_s)


async def _judge_aside(execution: Execution, attempts: int, *, phrase_passed: bool) -> Grade:
    return await run_aside(
        len(execution.stdout),
        lambda: judge_execution(execution, attempts=attempts, phrase_passed=phrase_passed),
    )


def _failed_execution(error: BackendError) -> Execution:
    return Execution(
        error=str(error),
        timed_out=error.kind == "timeout",
        instance_lost=error.lost,
        retryable=not (error.lost or error.invalid),
    )
