"""The gateway's core at work: opens, calls, grades and closes episodes, and expires leases."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from services.common import trace
from services.common.log import get_logger
from services.common.watchdog import Watchdog
from services.env_gateway.api import prometheus
from services.env_gateway.config.gateway import EnvGatewayConfig
from services.env_gateway.episodes.counters import Counts
from services.env_gateway.episodes.instance_deletion import Closer
from services.env_gateway.episodes.instance_journal import Journal
from services.env_gateway.episodes.leases import EpisodeBook, EpisodeLostError, OpenSpec, State
from services.env_gateway.episodes.opening import Opener
from services.env_gateway.episodes.session import Answer, Session, Signal
from services.env_gateway.grading.grader import VerifierRunner
from services.env_gateway.grading.verdict import Grade
from services.env_gateway.limits.admission import Admission, Ticket
from services.env_gateway.limits.rate_gates import PacedGate, grade_gate
from services.env_gateway.ports import Backend, Mortal, Submission
from services.env_gateway.tools.computer_tool import Scale, unscaled
from services.env_gateway.tools.tool_calls import Caller

T = TypeVar("T")

_LOG = get_logger(__name__)


class DrainingError(Exception):
    """The gateway takes no new episodes."""


class UnknownEnvironmentError(Exception):
    """No backend serves the environment."""


class Gateway:
    """`incarnation` makes episode ids of one start of one gateway unique for ever."""

    def __init__(
        self,
        config: EnvGatewayConfig,
        backends: Mapping[str, Backend],
        verifiers: VerifierRunner,
        journal: Journal,
        *,
        incarnation: str,
        rng: random.Random | None = None,
        watchdog: Watchdog | None = None,
        scale: Scale | None = None,
        sandbox_limits: Sequence[str] = (),
    ) -> None:
        rng = rng or random.Random()
        self._watchdog = watchdog or Watchdog(limit_s=config.stall_s)
        self.config = config
        self.counts = Counts()
        self.draining = False
        self.sandbox_limits = sandbox_limits
        self.capacity_changed = Signal()
        self.backends = backends
        self._verifiers = verifiers
        self.book = EpisodeBook(prefix=incarnation, lease_ttl_s=config.lease_ttl_s)
        self.admission = _admission(config)
        self._sessions: dict[str, Session] = {}
        self._by_ticket: dict[Ticket, Session] = {}
        self.caller = Caller(config, rng)
        self.opener = Opener(
            config, self.book, journal, rng, self._watchdog, scale or unscaled, self.caller.gates
        )
        self.gradings: dict[str, PacedGate] = {}
        self.closer = Closer(config, journal, self._closed, rng)

    def open(self, spec: OpenSpec) -> Session:
        """Start an episode or join the one of the same request.

        Raises EpisodeLostError, UnknownEnvironmentError, DrainingError, OverLimitError and
        QueueFullError.
        """
        env_key = spec.task.env_key
        name = self.config.backend_of(env_key)
        backend = self.backends.get(name)
        if backend is None or not backend.serves(env_key):
            raise UnknownEnvironmentError(
                f"backend {name!r} has no environment {env_key!r}; "
                f"set env_gateway.environments.{env_key}.backend"
            )
        known = self.book.joined(spec)
        if known is not None:
            return self._sessions[known.episode_id]
        if self.draining:
            raise DrainingError("the gateway is draining")
        return self._start(spec, backend, name)

    def _start(self, spec: OpenSpec, backend: Backend, name: str) -> Session:
        now = _now()
        # Without the try: a re-leased group names attempts of which some have been tried before.
        batch = f"{spec.group_id}/{spec.worker_id}"
        ticket, admitted = self.admission.request(
            spec.run_id, batch, spec.task.env_key, spec.opening, now
        )
        episode, replaced = self.book.open(spec, now)
        session = Session(
            episode,
            backend=backend,
            backend_name=name,
            ticket=ticket,
            media=self.config.limits.media_bytes,
        )
        self._sessions[episode.episode_id] = session
        self._by_ticket[ticket] = session
        if replaced is not None:
            self.end(self._sessions[replaced.episode_id], "was replaced by a newer try")
        session.opener = asyncio.create_task(self.opener.open(session))
        self._admitted(admitted)
        return session

    def join(self, session: Session) -> None:
        """Somebody follows the opening of an episode."""
        session.watchers += 1

    def leave(self, session: Session) -> None:
        """Somebody follows it no longer. When nobody does before it is READY, it is closed."""
        session.watchers -= 1
        if session.failure is not None:
            self.end(session, f"could not be opened: {session.failure}")
        elif session.watchers == 0 and session.episode.state is not State.READY:
            self.end(session, "was given up while it opened", forget_request=True)

    def session(self, episode_id: str) -> Session:
        """Raises EpisodeLostError."""
        self.book.get(episode_id)
        return self._sessions[episode_id]

    async def call(
        self, session: Session, call_seq: int, name: str, arguments_json: str, timeout_s: float
    ) -> tuple[Answer, bool]:
        """The answer, and whether it is a stored one. The call goes on when its caller leaves.

        Raises CallSeqError and EpisodeLostError.
        """
        episode = session.episode
        if episode.state is not State.READY:
            raise EpisodeLostError(f"episode {episode.episode_id} is not ready")
        self.book.touch(episode, _now())
        new = episode.admit_call(call_seq)
        if new:
            work = self._call(session, call_seq, name, arguments_json, timeout_s)
            session.answers[call_seq] = asyncio.create_task(work)
            for old in episode.forget_old_calls():
                session.answers.pop(old)
        task = session.answers[call_seq]
        try:
            return await asyncio.shield(task), not new
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise EpisodeLostError(f"episode {episode.episode_id} {episode.detail}") from None

    async def _call(
        self, session: Session, call_seq: int, name: str, arguments_json: str, timeout_s: float
    ) -> Answer:
        env_key, was_tainted = session.env_key, session.episode.tainted
        facts = {
            "episode_id": session.episode.episode_id,
            "call_seq": call_seq,
            "env_key": env_key,
            "tool": name[:100],
        }
        with self._watchdog.stage("call tool"), trace.span("call", facts):
            answer = await self.caller.run(session, name, arguments_json, timeout_s)
            trace.annotate({"outcome": answer.outcome.value, "attempts": answer.attempts})
        self.counts.called(env_key, answer)
        self.counts.tainted[env_key] += session.episode.tainted and not was_tainted
        prometheus.called(env_key, answer)
        return answer

    async def grade(
        self, session: Session, final_answer: str | None, conversation: str | None, timeout_s: float
    ) -> Grade:
        """The first known grade stands; one that is being found is waited for.

        Raises EpisodeLostError.
        """
        episode = session.episode
        if episode.state is not State.READY:
            raise EpisodeLostError(f"episode {episode.episode_id} is not ready")
        self.book.touch(episode, _now())
        known = session.known_grade()
        if known is not None:
            return known
        if session.grading is None or session.grading.done():
            answer = session.final_answer if final_answer is None else final_answer
            submission = Submission(episode.spec.task, answer, conversation)
            gate = self._grading_gate(session)
            work = lambda: self._verifiers.grade(session, submission, timeout_s, gate)  # noqa: E731
            session.grading = asyncio.create_task(self._watched("grade", work))
            session.grading.add_done_callback(lambda task: self._graded(session, task))
        task = session.grading
        await asyncio.wait({task})
        if task.cancelled():
            raise EpisodeLostError(f"episode {episode.episode_id} {episode.detail}")
        return task.result()

    def close(self, episode_id: str) -> None:
        """End an episode; one that has ended already, or never was, is as good as closed."""
        session = self._sessions.get(episode_id)
        if session is not None:
            self.end(session, "was closed")

    def end(self, session: Session, reason: str, *, forget_request: bool = False) -> None:
        creating = session.episode.state is State.PROVISIONING
        if not self.book.close(session.episode, reason, forget_request=forget_request):
            return
        if session.opener is not None and not creating:
            # A creation is waited for instead: cancelled, it might still make an instance.
            session.opener.cancel()
        del self._sessions[session.episode.episode_id]
        session.cancel_work()
        self.closer.discard(session)

    def renew(self, worker_id: str, episode_ids: list[str]) -> list[str]:
        """Renew leases; returns the episodes that the worker no longer has."""
        for episode_id in episode_ids:
            if (session := self._sessions.get(episode_id)) is not None:
                self._notice_end(session)
        return self.book.renew(worker_id, episode_ids, _now())

    def expire(self) -> None:
        """Close what nobody renews, and take back places that nobody claimed."""
        now = _now()
        for episode, reason in self.book.expired(now):
            _LOG.warning("episode_expired", episode_id=episode.episode_id, reason=reason)
            self.counts.expired[episode.spec.task.env_key] += 1
            self.end(self._sessions[episode.episode_id], reason)
        self._admitted(self.admission.expire(now))

    async def run(self) -> None:
        """Close what a predecessor left, then expire leases, for ever."""
        if orphans := self.closer.reclaim(self.backends):
            _LOG.warning("closing_orphans", instances=orphans)
        period_s = min(1.0, self.config.lease_ttl_s / 4)
        while True:
            await asyncio.sleep(period_s)
            self.expire()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new episodes, wait for the open ones, then close what is left."""
        self.draining = True
        self.capacity_changed.notify()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.book):
                    await self.capacity_changed.wait()
        for session in list(self._sessions.values()):
            self.end(session, "was closed by a drain")
        await self.closer.wait(self.config.close_timeout_s)

    def _notice_end(self, session: Session) -> None:
        """An instance that is known to have ended is lost before anybody meets it."""
        instance, episode = session.instance, session.episode
        ended = instance.ended if isinstance(instance, Mortal) else None
        if ended is not None and not episode.lost:
            episode.lost = True
            _LOG.warning("episode_lost", episode_id=episode.episode_id, why=ended)

    def _admitted(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._by_ticket[ticket].changed.notify()
        self.capacity_changed.notify()

    async def _watched(self, stage: str, work: Callable[[], Awaitable[T]]) -> T:
        with self._watchdog.stage(stage):
            return await work()

    def _grading_gate(self, session: Session) -> PacedGate:
        gate = self.gradings.get(session.backend_name)
        if gate is None:
            gate = grade_gate(self.config, apart=session.backend.apart)
            self.gradings[session.backend_name] = gate
        return gate

    def _closed(self, session: Session) -> None:
        self._by_ticket.pop(session.ticket)
        self._admitted(self.admission.release(session.ticket))

    def _graded(self, session: Session, task: asyncio.Task[Grade]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.counts.graded(session.env_key, task.result())


def _admission(config: EnvGatewayConfig) -> Admission:
    limits = config.limits
    by_env = {
        env_key: environment.max_episodes
        for env_key, environment in config.environments.items()
        if environment.max_episodes is not None
    }
    return Admission(
        max_episodes=limits.max_episodes,
        max_by_env=by_env,
        max_waiting=limits.max_waiting,
        batch_wait_s=limits.batch_wait_s,
        weight_of=config.weight_of,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
