"""Grading of episodes: after the calls in flight, and only of a known state."""

import asyncio

from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.telemetry.log import get_logger
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.counters import GatewayCounts
from flotilla_env_gateway.episodes.episode_book import EpisodeLostError
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.turn_line import TurnPlace
from flotilla_env_gateway.grading.grader import GradingJob, VerifierRunner
from flotilla_env_gateway.grading.verdict import no_grade
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.limits.rate_gates import grade_gate
from flotilla_env_gateway.limits.request_gates import Gate
from flotilla_env_gateway.ports import BackendError, Instance, Submission

_LOG = get_logger(__name__)
# An environment may take so long to prove that it runs, with so long for each answer; anew after
# each refusal.
_PROOF_S, _ANSWER_S = 30.0, 10.0
_PROOF_BASE_S, _PROOF_CAP_S = 0.1, 2.0
_GONE = "the environment instance is gone"


class RegradeError(Exception):
    """A grade was asked for again where grading ends the episode."""


class EpisodeGrader:
    """Grades episodes. The first known grade is final, unless it is asked for again; a grading in
    progress is joined."""

    def __init__(
        self,
        config: EnvGatewayConfig,
        verifiers: VerifierRunner,
        counts: GatewayCounts,
        watchdog: Watchdog,
    ) -> None:
        self._config = config
        self._verifiers = verifiers
        self._counts = counts
        self._watchdog = watchdog
        # By backend.
        self.gates: dict[str, Gate] = {}

    async def grade_episode(
        self,
        session: Session,
        final_answer: str | None,
        conversation: str | None,
        timeout_s: float,
        *,
        again: bool = False,
    ) -> Grade:
        """Grade a READY episode. Raises EpisodeLostError and RegradeError."""
        episode = session.episode
        if again and session.instance is not None and not session.instance.regrades:
            raise RegradeError(f"grading ends episode {episode.episode_id}: open another")
        known = session.known_grade()
        if known is not None and not again:
            return known
        if session.grading is None or session.grading.done():
            made = _make_submission(session, final_answer, conversation)
            submission = self._verifiers.add_environment_verifier(made)
            grading = self._settle_grade(session, submission, timeout_s)
            session.grading = asyncio.create_task(grading)
            session.grading.add_done_callback(lambda task: self._count_grade(session, task))
        task = session.grading
        await asyncio.wait({task})
        if task.cancelled():
            raise EpisodeLostError(f"episode {episode.episode_id} {episode.detail}")
        return task.result()

    async def _settle_grade(
        self, session: Session, submission: Submission, timeout_s: float
    ) -> Grade:
        instance = session.instance
        if instance is None:
            return _lost_grade()
        grade = await instance.settle_grade(
            submission, lambda: self._grade_in_time(session, instance, submission, timeout_s)
        )
        session.record.note_grade(submission, grade)
        return grade

    async def _grade_in_time(
        self, session: Session, instance: Instance, submission: Submission, timeout_s: float
    ) -> Grade:
        """Grade an episode in its final state, once its calls in flight have ended. Raises nothing
        for the behaviour of a verifier or an environment."""
        until = min(loop_time() + timeout_s, session.episode.ends_at)
        job = self._make_job(session, instance, submission, until)
        try:
            with self._watchdog.stage("grade"):
                turn = session.line.hold_turn(session.line.enter_line(TurnPlace()))
                async with asyncio.timeout_at(until), turn:
                    return await self._grade_known_state(session, job)
        except TimeoutError as error:
            why = job.refusal or job.gate.describe_pace()
            late = f"no grade within {timeout_s:.1f} s" + (f"; {why}" if why else "")
            return no_grade(NoGradeReason.TIMEOUT, str(error) or late)
        except Exception as error:  # noqa: BLE001
            # An answer that no adapter foresaw. The waiters get the reason, and may retry.
            _LOG.exception("grade_failed", episode_id=job.episode_id)
            return no_grade(NoGradeReason.EXECUTION_FAILED, f"the gateway failed: {error!r}"[:500])

    async def _grade_known_state(self, session: Session, job: GradingJob) -> Grade:
        if session.episode.lost:
            return _lost_grade()
        if session.episode.tainted:
            return _tainted_grade()
        if why := await _find_end(job):
            session.mark_lost(why)
            return _lost_grade(why)
        if self._config.is_judged(session.env_key):
            return Grade(to_be_judged=True, attempts=0)
        return await self._verifiers.grade_final_state(job)

    def _make_job(
        self, session: Session, instance: Instance, submission: Submission, until: float
    ) -> GradingJob:
        return GradingJob(
            session.episode.episode_id,
            instance,
            submission,
            session.passed_text,
            self._backend_gate(session),
            until,
        )

    def _backend_gate(self, session: Session) -> Gate:
        gate = self.gates.get(session.backend_name)
        if gate is None:
            gate = grade_gate(self._config, apart=session.backend.isolates_instances)
            self.gates[session.backend_name] = gate
        return gate

    def _count_grade(self, session: Session, task: asyncio.Task[Grade]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._counts.count_grade(session.env_key, task.result())


def _make_submission(
    session: Session, final_answer: str | None, conversation: str | None
) -> Submission:
    return Submission(
        session.episode.spec.task,
        session.final_answer if final_answer is None else final_answer,
        conversation,
        readable=session.readable,
        run_id=session.run_id,
    )


async def _find_end(job: GradingJob) -> str:
    """Return "" once the instance proves that it runs, else why it counts as lost: a verifier may
    take the silence of one that has ended for a failed task."""
    instance, until = job.instance, min(job.until, loop_time() + _PROOF_S)
    backoff = Backoff(base_s=_PROOF_BASE_S, cap_s=_PROOF_CAP_S)
    while not (why := instance.end_reason):
        try:
            alive = await instance.is_alive(timeout_s=min(_ANSWER_S, seconds_left(until)))
        except BackendError as error:
            wait_s = backoff.next_wait_s(error.retry_after_s)
            if error.kind == "throttled":
                job.refusal, until = str(error), loop_time() + wait_s + _PROOF_S
            elif loop_time() + wait_s >= until:
                return f"the environment does not answer: {error}"
            await asyncio.sleep(wait_s)
        else:
            job.refusal = ""
            return "" if alive else instance.end_reason or _GONE
    return why


def _lost_grade(why: str = _GONE) -> Grade:
    return no_grade(NoGradeReason.INSTANCE_LOST, why)


def _tainted_grade() -> Grade:
    return no_grade(
        NoGradeReason.TAINTED,
        "a tool call may or may not have been executed; the final state is unknown",
    )
