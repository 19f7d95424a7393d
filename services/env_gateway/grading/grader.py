"""Grading of an episode with its task's verifier: trust, repetition and deadlines."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from services.common.domain.attempts import NoGradeReason
from services.common.errors import ConfigError
from services.common.log import get_logger
from services.common.parsing import run_aside
from services.env_gateway.config.gateway import EnvGatewayConfig, VerifiersConfig
from services.env_gateway.episodes.session import Session
from services.env_gateway.grading.authorship import NOBODY, Authorship, authorship_of
from services.env_gateway.grading.untouched_baseline import UntouchedBaseline
from services.env_gateway.grading.verdict import (
    Grade,
    cap_partial_reward,
    compute_partial_reward,
    judge_execution,
    no_grade,
)
from services.env_gateway.grading.verifier_request import RefusalRetrier, make_verification
from services.env_gateway.limits.rate_gates import PacedGate
from services.env_gateway.ports import (
    BackendError,
    Execution,
    Grader,
    Instance,
    Submission,
    Verification,
)
from services.env_gateway.tools.retry_policy import Backoff
from services.env_gateway.verify.verifier_finder import VerifierFinder
from services.env_gateway.verify.verifier_source import VerifierError, find_verifier

_LOG = get_logger(__name__)
_BASE_S, _CAP_S = 0.2, 5.0
_MARGIN_S = 0.5
# What a policy wrote is read in several ways.
_READING_COSTS = 8

T = TypeVar("T")
_DIGESTS = "env_gateway.verifiers.digests"
_OWN_DIGESTS = Path(__file__).parents[3] / "environments/verifiers.sha256"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def load_digests(path: Path | None) -> frozenset[str]:
    """Load the SHA-256 digests listed in a file, in the format of `sha256sum`. None stands for
    the repository's own file, if it is installed. Raises ConfigError if the file cannot be
    read or lists anything else."""
    if path is None and not _OWN_DIGESTS.exists():
        return frozenset()
    try:
        lines = (path or _OWN_DIGESTS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{_DIGESTS}: {path}: {error}; it is looked for beside the spec, then in {Path.cwd()}."
            " Write the SHA-256 of each verifier's source there, one a line, or take the key out"
        ) from error
    digests = [line.split()[0].lower() for line in lines if line.strip()]
    if wrong := next((word for word in digests if not _SHA256.fullmatch(word)), None):
        raise ConfigError(
            f"{_DIGESTS}: {path}: {wrong!r} is no SHA-256; write it as sha256sum does"
        )
    return frozenset(digests)


def load_verifiers(config: EnvGatewayConfig) -> dict[str, str]:
    """Load the sources of `environments.KEY.verifier`. Raises ConfigError with the name of a
    file that is missing or holds no verifier."""
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


class NoVerifierError(VerifierError):
    """Error for a task without any verifier source."""


class VerifierRunner:
    """Runs verifiers and grades with them. Those in `digests` are trusted; the grader decides
    where others may run."""

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
        self._untouched = UntouchedBaseline()
        self._finder = VerifierFinder()
        self._rng = rng or random.Random()

    async def grade_session(
        self, session: Session, submission: Submission, timeout_s: float, gate: PacedGate
    ) -> Grade:
        """Grade an episode. It waits for the call in flight, so that the state is final, and
        at the gate for each run. It never raises for the behaviour of a verifier or an
        environment."""
        until = min(_now() + timeout_s, session.episode.ends_at)
        work = _GradingJob(session, self._complete_submission(session, submission), gate, until)
        try:
            async with asyncio.timeout_at(until), session.turn:
                return await self._grade_final_state(work)
        except TimeoutError:
            detail = f"no grade within {timeout_s:.1f} s"
            return no_grade(
                NoGradeReason.TIMEOUT, f"{detail}; {work.refusal}" if work.refusal else detail
            )
        except Exception as error:  # noqa: BLE001
            # An answer that no adapter foresaw. Whoever waits must hear of it, and may ask again.
            _LOG.exception("grade_failed", episode_id=session.episode.episode_id)
            return no_grade(NoGradeReason.EXECUTION_FAILED, f"the gateway failed: {error!r}"[:500])

    def _complete_submission(self, session: Session, submission: Submission) -> Submission:
        """Complete the submission: its tools, its run, and the environment's verifier for a
        task without one."""
        task = submission.task
        readable = frozenset(tool.name for tool in session.tools.values() if tool.read_only)
        verifier = task.verifier or self._by_env.get(task.env_key)
        task = replace(task, verifier=verifier)
        return replace(submission, task=task, readable=readable, run_id=session.run_id)

    async def _grade_final_state(self, work: "_GradingJob") -> Grade:
        episode = work.session.episode
        if episode.lost or work.session.instance is None:
            return no_grade(NoGradeReason.INSTANCE_LOST, "the environment instance is gone")
        if episode.tainted:
            return _tainted_grade()
        instance = work.session.instance
        writings, submission = work.session.writings, work.submission
        said = len(submission.conversation or "") + len(submission.final_answer or "")
        authorship = await run_aside(said, lambda: authorship_of(writings, submission))
        try:
            grade = await self._run_until_settled(
                work, authorship, lambda: self._run_verifier(work, instance)
            )
        except NoVerifierError:
            return no_grade(NoGradeReason.NO_VERIFIER, "the task has no verifier")
        except VerifierError as error:
            detail = f"of task {submission.task.key!r}, {error}"
            return no_grade(NoGradeReason.EXECUTION_FAILED, detail)
        if grade.suspicion:
            _LOG.warning(
                "reward_hacking_suspected",
                episode_id=episode.episode_id,
                task=submission.task.key,
                printed=grade.suspicion,
            )
        return await self._add_partial_reward(grade, work, instance)

    async def _run_verifier(self, work: "_GradingJob", instance: Instance) -> Execution:
        """Run the verifier once, in the environment or in the gateway. Raises BackendError and
        VerifierError."""
        async with work.hold_place():
            timeout_s = min(self._config.timeout_s, _time_left(work.until))
            execution = await instance.grade_submission(work.submission, timeout_s=timeout_s)
            if execution is not None:
                return execution
            asked = await self._prepare_verification(instance, work.submission, work.until)
            return await self._execute_here(asked, work.until)

    async def _run_until_settled(
        self, work: "_GradingJob", authorship: Authorship, run: Callable[[], Awaitable[Execution]]
    ) -> Grade:
        """Run the verifier until its result is final or time is up; return the last run's
        grade with the number of runs. Runs refused before they began are not counted and
        are retried while time remains."""
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S, rng=self._rng)
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
            wait_s = backoff.next_wait_s(error.retry_after_s if error else None)
            grade = await _judge_aside(execution, attempts, authorship)
            repeatable = execution.retryable or grade.reason is NoGradeReason.JUDGE_ERROR
            if not repeatable or attempts >= self._config.attempts:
                return grade
            if wait_s >= _time_left(work.until):
                return replace(grade, reason=NoGradeReason.TIMEOUT) if refused else grade
            work.refusal = str(error) if refused else ""
            await asyncio.sleep(wait_s)

    async def _prepare_verification(
        self, instance: Instance, submission: Submission, until: float
    ) -> Verification:
        """Prepare the submission's verifier to run in the gateway. Raises VerifierError."""
        source = submission.task.verifier
        if source is None:
            raise NoVerifierError("the task has no verifier")
        function = await self._finder.find_function(source)
        asking = RefusalRetrier(until, self._config.timeout_s, self._rng)
        return make_verification(instance, submission, function, asking, trusted=self._digests)

    async def _add_partial_reward(
        self, grade: Grade, work: "_GradingJob", instance: Instance
    ) -> Grade:
        """Return the grade with the partial reward that the configuration requests."""
        if self._config.partial == "off" or grade.reward is None:
            return replace(grade, partial_reward=None)
        share, by_itself = grade.partial_reward, self._config.partial == "earned"
        if by_itself and grade.checks_failed and share is not None:
            share = await self._earned_share(grade, grade.reward, work, instance)
            grade = replace(grade, partial_reward=share)
        if self._config.partial_is_reward and grade.reward == 0 and share is not None:
            return replace(grade, reward=share)
        return grade

    async def _earned_share(
        self, grade: Grade, reward: float, work: "_GradingJob", instance: Instance
    ) -> float | None:
        try:
            asked = await self._prepare_verification(instance, work.submission, work.until)
        except VerifierError:
            return None

        async def run_untouched(untouched: Verification) -> Execution:
            async with work.hold_place():
                return await self._execute_here(untouched, work.until)

        async def grade_untouched(untouched: Verification) -> Grade:
            # Nothing was written there yet.
            return await self._run_until_settled(work, NOBODY, lambda: run_untouched(untouched))

        # The grade itself is known, and must not be lost for this.
        until = work.until - _MARGIN_S
        task = work.submission.task
        free = await self._untouched.find_passing_checks(task, asked, grade_untouched, until=until)
        if free is None:
            return None
        return cap_partial_reward(
            compute_partial_reward(grade.checks_passed, grade.checks_failed, free=free), reward
        )

    async def _execute_here(self, verification: Verification, until: float) -> Execution:
        timeout_s = min(self._config.timeout_s, _time_left(until))
        return await self._grader.run_verifier(verification, timeout_s=timeout_s)


@dataclass(slots=True)
class _GradingJob:
    """One grading with its deadline. `refusal` is the backend's last refusal while no run has
    begun."""

    session: Session
    submission: Submission
    gate: PacedGate
    until: float
    refusal: str = ""

    def hold_place(self) -> AbstractAsyncContextManager[None]:
        """Hold a place among the runs in flight; TimeoutError if none is free in time."""
        instance = self.session.instance
        return self.gate.hold_place(
            self.session.run_id,
            self.until,
            kind=self.submission.task.key,
            instance_id=instance.instance_id if instance else "",
        )


async def _judge_aside(execution: Execution, attempts: int, authorship: Authorship) -> Grade:
    size = _READING_COSTS * (len(execution.stdout) + authorship.chars)
    return await run_aside(
        size, lambda: judge_execution(execution, attempts=attempts, authorship=authorship)
    )


def _failed_execution(error: BackendError) -> Execution:
    return Execution(
        error=str(error),
        timed_out=error.kind == "timeout",
        instance_lost=error.lost,
        retryable=not (error.lost or error.invalid),
    )


def _tainted_grade() -> Grade:
    return no_grade(
        NoGradeReason.TAINTED,
        "a tool call may or may not have been executed; the final state is unknown",
    )


def _time_left(until: float) -> float:
    return max(0.001, until - _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
