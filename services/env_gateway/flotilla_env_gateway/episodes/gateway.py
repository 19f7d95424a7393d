"""The gateway's core: opens, grades and closes episodes, makes their tool calls, and expires
leases."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from flotilla_common.aio.change_signal import ChangeSignal
from flotilla_common.domain.attempts import Grade
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.telemetry.log import get_logger
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.call_replay import CallReplayer
from flotilla_env_gateway.episodes.counters import GatewayCounts
from flotilla_env_gateway.episodes.episode_book import (
    EpisodeBook,
    EpisodeLostError,
    EpisodeSpec,
    EpisodeState,
)
from flotilla_env_gateway.episodes.episode_grading import EpisodeGrader
from flotilla_env_gateway.episodes.episode_opening import EpisodeOpener
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.instance_deletion import InstanceDeleter
from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
from flotilla_env_gateway.episodes.tool_calls import ToolCaller
from flotilla_env_gateway.grading.grader import VerifierRunner
from flotilla_env_gateway.limits.episode_admission import Admission, Ticket
from flotilla_env_gateway.ports import Backend, CallAnswer, Recorder
from flotilla_env_gateway.tools.computer_tool import ScaleImage, keep_unscaled

_LOG = get_logger(__name__)


class DrainingError(Exception):
    """The gateway takes no new episodes."""


class UnknownEnvironmentError(Exception):
    """No backend serves the environment."""


class Gateway:
    """All episodes of one gateway process. `incarnation` makes the episode ids of one start of
    one gateway unique forever."""

    def __init__(
        self,
        config: EnvGatewayConfig,
        backends: Mapping[str, Backend],
        verifiers: VerifierRunner,
        journal: InstanceJournal,
        *,
        incarnation: str,
        watchdog: Watchdog | None = None,
        scale: ScaleImage | None = None,
        sandbox_limits: Sequence[str] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._watchdog = watchdog or Watchdog(limit_s=config.stall_s)
        self.config = config
        self.counts = GatewayCounts()
        self.draining = False
        self.sandbox_limits = sandbox_limits
        self.capacity_changed = ChangeSignal()
        self.backends = backends
        self.book = EpisodeBook(prefix=incarnation, lease_ttl_s=config.lease_ttl_s)
        self.admission = _make_admission(config)
        self._sessions: dict[str, Session] = {}
        self._by_ticket: dict[Ticket, Session] = {}
        self.caller = ToolCaller(config)
        self.calls = CallReplayer(self.caller, self.counts, self._watchdog)
        self.opener = EpisodeOpener(
            config,
            self.book,
            journal,
            self._watchdog,
            scale or keep_unscaled,
            self.caller.gates,
            recorder or Recorder(),
        )
        self._verifiers = verifiers
        self.grader = EpisodeGrader(config, verifiers, self.counts, self._watchdog)
        self.closer = InstanceDeleter(config, journal, self._release_place)

    def open_episode(self, spec: EpisodeSpec) -> Session:
        """Start an episode or join the one of the same request.

        Raises EpisodeLostError, UnknownEnvironmentError, DrainingError, OverLimitError and
        QueueFullError.
        """
        env_key = spec.task.env_key
        name = self.config.backend_of(env_key)
        backend = self.backends.get(name)
        if backend is None or not backend.serves_environment(env_key):
            raise UnknownEnvironmentError(
                f"backend {name!r} has no environment {env_key!r}; "
                f"set env_gateway.environments.{env_key}.backend"
            )
        known = self.book.find_joinable(spec)
        if known is not None:
            return self._sessions[known.episode_id]
        if self.draining:
            raise DrainingError("the gateway is draining")
        return self._start_episode(spec, backend, name)

    def _start_episode(self, spec: EpisodeSpec, backend: Backend, name: str) -> Session:
        now = loop_time()
        # Without the try: some attempts of a re-leased group may have been tried before.
        batch = f"{spec.group_id}/{spec.worker_id}"
        ticket, admitted = self.admission.request_place(
            spec.run_id, batch, spec.task.env_key, spec.opening, now
        )
        episode, replaced = self.book.open_episode(spec, now)
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
            self.end_episode(self._sessions[replaced.episode_id], "was replaced by a newer try")
        session.opener = asyncio.create_task(self.opener.open_episode(session))
        self._notify_admitted(admitted)
        return session

    def join_opening(self, session: Session) -> None:
        """Register a watcher of an episode's opening."""
        session.watchers += 1

    def leave_opening(self, session: Session) -> None:
        """Unregister a watcher. Without any watcher, an episode that is not READY yet is
        closed."""
        session.watchers -= 1
        if session.failure is not None:
            self.end_episode(session, f"could not be opened: {session.failure}")
        elif session.watchers == 0 and session.episode.state is not EpisodeState.READY:
            self.end_episode(session, "was given up while it opened", forget_request=True)

    def get_session(self, episode_id: str) -> Session:
        """Return the session of an open episode. Raises EpisodeLostError."""
        self.book.get_episode(episode_id)
        return self._sessions[episode_id]

    async def call_tool(
        self, session: Session, call_seq: int, name: str, arguments_json: str, timeout_s: float
    ) -> tuple[CallAnswer, bool]:
        """Call a tool; return (answer, True if it is a stored one). The call continues when its
        caller disconnects.

        Raises CallSeqError and EpisodeLostError."""
        episode = session.episode
        if episode.state is not EpisodeState.READY:
            raise EpisodeLostError(f"episode {episode.episode_id} is not ready")
        self.book.extend_lease(episode, loop_time())
        return await self.calls.answer_call(session, call_seq, name, arguments_json, timeout_s)

    async def get_transcript_limit(self, session: Session) -> int:
        """Return the limit of the transcript for the grade; 0 if none is read there."""
        if self.config.is_judged(session.env_key):
            return 0
        reads = await self._verifiers.reads_conversation(session.episode.spec.task)
        return self.config.limits.transcript_bytes if reads else 0

    async def grade_episode(
        self,
        session: Session,
        final_answer: str | None,
        conversation: str | None,
        timeout_s: float,
        *,
        again: bool = False,
    ) -> Grade:
        """Grade an episode. The first known grade is final, unless it is asked for `again`; a
        grading in progress is joined.

        Raises EpisodeLostError and RegradeError."""
        episode = session.episode
        if episode.state is not EpisodeState.READY:
            raise EpisodeLostError(f"episode {episode.episode_id} is not ready")
        self.book.extend_lease(episode, loop_time())
        return await self.grader.grade_episode(
            session, final_answer, conversation, timeout_s, again=again
        )

    def close(self, episode_id: str) -> None:
        """End an episode. One that has already ended or never existed counts as closed."""
        session = self._sessions.get(episode_id)
        if session is not None:
            self.end_episode(session, "was closed")

    def end_episode(self, session: Session, reason: str, *, forget_request: bool = False) -> None:
        creating = session.episode.state is EpisodeState.PROVISIONING
        if not self.book.close(session.episode, reason, forget_request=forget_request):
            return
        if session.opener is not None and not creating:
            # A creation is awaited instead: if cancelled, it might still create an instance.
            session.opener.cancel()
        del self._sessions[session.episode.episode_id]
        session.cancel_work()
        session.record.note_end()
        self.closer.delete_instance(session)

    def renew_leases(self, worker_id: str, episode_ids: list[str]) -> list[str]:
        """Renew leases; return the episodes that the worker no longer holds."""
        for episode_id in episode_ids:
            if (session := self._sessions.get(episode_id)) is not None:
                self._note_instance_end(session)
        return self.book.renew_leases(worker_id, episode_ids, loop_time())

    def expire_leases(self) -> None:
        """Close episodes whose lease or budget has run out, and stop waiting for incomplete
        batches."""
        now = loop_time()
        for episode, reason in self.book.list_expired(now):
            _LOG.warning("episode_expired", episode_id=episode.episode_id, reason=reason)
            self.counts.expired[episode.spec.task.env_key] += 1
            self.end_episode(self._sessions[episode.episode_id], reason)
        self._notify_admitted(self.admission.expire_batches(now))

    async def run_lease_loop(self) -> None:
        """Delete a predecessor's instances, then expire leases forever."""
        if orphans := self.closer.reclaim_orphans(self.backends):
            _LOG.warning("closing_orphans", instances=orphans)
        period_s = min(1.0, self.config.lease_ttl_s / 4)
        while True:
            await asyncio.sleep(period_s)
            self.expire_leases()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new episodes, wait for the open ones, then close what is left."""
        self.draining = True
        self.capacity_changed.notify_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.book):
                    await self.capacity_changed.next_change.wait()
        for session in list(self._sessions.values()):
            self.end_episode(session, "was closed by a drain")
        await self.closer.wait_until_deleted(self.config.close_timeout_s)

    def _note_instance_end(self, session: Session) -> None:
        """Mark an episode lost once its instance is known to have ended, before any call meets
        it."""
        ended = session.instance.end_reason if session.instance is not None else None
        if ended is not None and not session.episode.lost:
            session.mark_lost(ended)
            session.record.note_loss(ended)

    def _notify_admitted(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._by_ticket[ticket].changed.notify_all()
        self.capacity_changed.notify_all()

    def _release_place(self, session: Session) -> None:
        self._by_ticket.pop(session.ticket)
        self._notify_admitted(self.admission.release_place(session.ticket))


def _make_admission(config: EnvGatewayConfig) -> Admission:
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
