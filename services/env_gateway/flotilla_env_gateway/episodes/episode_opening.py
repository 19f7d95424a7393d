"""Opening of episodes, from the queue to READY."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from flotilla_common.domain.attempts import NoGradeReason
from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.tasks.task_format import SCREEN_MODALITIES, SINGLE_TURN
from flotilla_common.telemetry.log import get_logger
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes import event_metrics
from flotilla_env_gateway.episodes.call_gates import CallGates
from flotilla_env_gateway.episodes.episode_book import EpisodeBook, EpisodeState
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
from flotilla_env_gateway.episodes.tool_watch import ToolWatch
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.limits.rate_gates import creation_gate
from flotilla_env_gateway.limits.request_gates import Gate, NoPlaceError
from flotilla_env_gateway.ports import (
    BAD_TASK,
    BackendError,
    Instance,
    Media,
    Part,
    ProvisionRequest,
    Recorder,
    Tool,
)
from flotilla_env_gateway.tools.computer_tool import (
    ScaleImage,
    make_screen,
    offer_screen,
    parse_first_screenshot,
)
from flotilla_env_gateway.tools.tool_selection import (
    NothingToOfferError,
    select_named,
    select_of_modality,
)

_LOG = get_logger(__name__)
# An instance that ends itself must outlive the episode and its grading.
_TTL_MARGIN_S = 120.0
_BASE_S, _CAP_S = 0.1, 10.0
_WARMING_CAP_S = 2.0
# A READY message holds both and the prompt, and must not exceed the usual limit.
_TOOLS_BYTES = 2**19
_SHOWN_BYTES = 2**17

T = TypeVar("T")


class EpisodeOpener:
    """Creates instances and brings their episodes to READY. `created` counts the requested
    instances, whether or not they came to exist."""

    def __init__(
        self,
        config: EnvGatewayConfig,
        book: EpisodeBook,
        journal: InstanceJournal,
        watchdog: Watchdog,
        scale: ScaleImage,
        gates: CallGates,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._scale = scale
        self._gates = gates
        self.tool_watch = ToolWatch(gates)
        self._config = config
        self._book = book
        self._journal = journal
        self._watchdog = watchdog
        # By backend.
        self.creations: defaultdict[str, Gate] = defaultdict(partial(creation_gate, config))
        self.created = 0

    async def open_episode(self, session: Session) -> None:
        """Bring the episode to READY, or set `failure`. If the episode is closed meanwhile,
        any created instance is left in `session.instance` for deletion."""
        started = loop_time()
        try:
            while not session.ticket.admitted and not _is_closed(session):
                await session.changed.next_change.wait()
            await self._provision_instance(session)
            with self._watchdog.stage("warm environment"):
                await self._warm_instance(session)
        except BackendError as error:
            if error.kind == NoGradeReason.REPLAY_MISS:
                session.no_grade = NoGradeReason.REPLAY_MISS
            session.task_fault = error.kind == BAD_TASK
            self._fail_opening(session, str(error))
        except Exception as error:  # noqa: BLE001
            # A server may answer something that no adapter foresaw: the waiters get the reason.
            _LOG.exception("open_failed", episode_id=session.episode.episode_id)
            self._fail_opening(session, f"the gateway failed: {error!r}")
        session.open_s = loop_time() - started
        event_metrics.open_seconds(session.env_key, "all")(session.open_s)
        session.changed.notify_all()

    async def _provision_instance(self, session: Session) -> None:
        if _is_closed(session):
            return
        episode = session.episode
        self._enter_state(session, EpisodeState.PROVISIONING)
        self._journal.record_creating(episode.episode_id, backend=session.backend_name)
        session.journaled = True
        self.created += 1
        spec = episode.spec
        request = ProvisionRequest(
            episode.episode_id,
            spec.task,
            episode.ends_at - loop_time() + _TTL_MARGIN_S,
            spec.group_id,
            spec.attempt_index,
            spec.try_index,
        )
        session.record = self._recorder.start_episode(request)
        session.instance = await self._retry_until_open(
            session, lambda time: self._create_instance(session, request, time), cap_s=_CAP_S
        )
        self._journal.record_created(episode.episode_id, session.instance.instance_id)

    async def _create_instance(
        self, session: Session, request: ProvisionRequest, time: "_TimeToOpen"
    ) -> Instance:
        creation = self.creations[session.backend_name]
        waiting_since = loop_time()
        async with creation.hold_place(session.run_id, session.episode.ends_at):
            time.give_back(loop_time() - waiting_since)
            existed, session.may_exist = session.may_exist, True
            try:
                with self._watchdog.stage("create environment"):
                    return await session.backend.provision_instance(
                        request, timeout_s=time.left_s()
                    )
            except BackendError as error:
                session.may_exist = existed or error.delivered is not False
                raise

    async def _warm_instance(self, session: Session) -> None:
        instance = session.instance
        if instance is None or _is_closed(session):
            return
        self._enter_state(session, EpisodeState.WARMING)
        if session.episode.spec.task.modality != SINGLE_TURN:
            await self._await_readiness(session, instance)
        else:
            session.record.note_opened(instance, (), ())
        if not _is_closed(session):
            event_metrics.open_seconds(session.env_key, EpisodeState.WARMING)(
                loop_time() - session.state_since
            )
            self._book.mark_ready(session.episode, loop_time())

    async def _await_readiness(self, session: Session, instance: Instance) -> None:
        """Wait until the instance lists its tools, then get its first observation."""
        tools = await self._retry_until_open(
            session,
            lambda time: self._send_in_turn(
                session, "list_tools", lambda s: instance.list_tools(timeout_s=s), time
            ),
            cap_s=_WARMING_CAP_S,
        )
        _check_tools_size(tools)
        self._offer_tools(session, tools)
        self.tool_watch.note_opened(session, instance, tools)
        shown = await self._retry_until_open(
            session,
            lambda time: self._send_in_turn(
                session, "observe", lambda s: _observe(session, instance, s), time
            ),
            cap_s=_WARMING_CAP_S,
        )
        session.record.note_opened(instance, tools, shown)
        await session.passed_text.note_parts(shown)
        if session.screen is not None:
            shown = await session.screen.convert_parts(shown)
        session.first_observation = await session.media.store_large_parts(
            tuple(shown), _SHOWN_BYTES
        )

    async def _send_in_turn(
        self,
        session: Session,
        kind: str,
        send: Callable[[float], Awaitable[T]],
        time: "_TimeToOpen",
    ) -> T:
        """Send a request to an instance that may not be ready yet, once there is a place for
        it."""
        waiting_since = loop_time()
        async with self._gates.hold_warming_place(session, kind, session.episode.ends_at):
            time.give_back(loop_time() - waiting_since)
            return await send(time.left_s())

    def _offer_tools(self, session: Session, tools: Sequence[Tool]) -> None:
        try:
            task = session.episode.spec.task
            chosen = select_named(select_of_modality(tools, task), task)
            config = self._config.screen_config_of(session.env_key)
            session.screen = make_screen(chosen, config, self._scale)
            session.tools = offer_screen(chosen, session.screen)
        except NothingToOfferError as error:
            # What lists no tools at all is out of order.
            kind = BAD_TASK if tools else "no_tools"
            raise BackendError(kind, str(error), delivered=False, invalid=True) from error
        # A verifier may read with tools that the policy does not see.
        session.readable = frozenset(tool.name for tool in tools if tool.read_only)

    async def _retry_until_open(
        self, session: Session, attempt: Callable[["_TimeToOpen"], Awaitable[T]], *, cap_s: float
    ) -> T:
        """Retry `attempt` until the time to open is over or the episode is closed. Creation
        and readiness checks are both safe to repeat."""
        time = _TimeToOpen(self._config.open_timeout_s, session.episode.ends_at)
        backoff = Backoff(base_s=_BASE_S, cap_s=cap_s)
        failure: BackendError | None = None
        while True:
            started = loop_time()
            try:
                return await attempt(time)
            except NoPlaceError:
                message = "the episode waited for its turn until it was over"
                no_place = BackendError("no_place", message, delivered=False)
                raise _name_earlier(failure, no_place) from None
            except BackendError as error:
                cut_short = error.kind == "timeout" and time.left_s() <= 0
                failure = _name_earlier(failure, error) if cut_short else error
            wait_s = backoff.next_wait_s(failure.retry_after_s)
            if failure.kind == "throttled":
                # Too many at once, or no instance free: a queue, not a fault.
                time.give_back(loop_time() - started + wait_s)
            else:
                session.trouble = str(failure)
                session.changed.notify_all()
            final = failure.invalid or failure.lost or wait_s >= time.left_s()
            if final or _is_closed(session):
                raise failure
            _LOG.info("open_retried", episode_id=session.episode.episode_id, error=str(failure))
            await _pause_unless_closed(session, wait_s)
            if _is_closed(session):
                raise failure

    def _enter_state(self, session: Session, state: EpisodeState) -> None:
        event_metrics.open_seconds(session.env_key, session.episode.state)(
            loop_time() - session.state_since
        )
        session.state_since = loop_time()
        session.episode.advance_state(state)
        session.trouble = ""
        session.changed.notify_all()

    def _fail_opening(self, session: Session, detail: str) -> None:
        session.failure = detail
        session.record.note_unopened(detail)
        if not _is_closed(session):
            session.episode.advance_state(EpisodeState.FAILED, detail)


async def _observe(session: Session, instance: Instance, timeout_s: float) -> Sequence[Part]:
    """Return the first observation: what the environment shows, or for a task on a screen, of
    which it shows nothing by itself, a first screenshot. Raises BackendError."""
    until = loop_time() + timeout_s
    shown = await instance.get_first_observation(timeout_s=timeout_s)
    look = session.screen.look if session.screen is not None else None
    seen = any(isinstance(part, Media) for part in shown)
    if seen or look is None or session.episode.spec.task.modality not in SCREEN_MODALITIES:
        return shown
    result = await instance.call_tool(
        look.tool.name, look.arguments, timeout_s=max(0.001, seconds_left(until))
    )
    return (*shown, *await parse_first_screenshot(result))


class _TimeToOpen:
    """Time budget of an opening: `seconds`, at most until the episode ends. Time spent waiting
    for a place is given back."""

    def __init__(self, seconds: float, ends_at: float) -> None:
        self._ends_at = ends_at
        self._until = min(loop_time() + seconds, ends_at)

    def left_s(self) -> float:
        return seconds_left(self._until)

    def give_back(self, seconds: float) -> None:
        self._until = min(self._until + seconds, self._ends_at)


def _name_earlier(earlier: BackendError | None, last: BackendError) -> BackendError:
    """Name the failure before the one that the end of the time caused, which does not say what the
    trouble is."""
    if earlier is not None:
        last.args = (f"{earlier}; then {last}",)
    return last


def _check_tools_size(tools: Sequence[Tool]) -> None:
    """Refuse tools that are too large for the one message that carries them all to the worker."""
    texts = [text for t in tools for text in (t.name, t.description, t.input_schema_json)]
    size = sum(map(len, texts))
    if size <= _TOOLS_BYTES:
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if size > _TOOLS_BYTES:
        raise BackendError(
            "too_large",
            f"{len(tools)} tools take {size} bytes, and no more than {_TOOLS_BYTES} can be "
            "offered; have the server list fewer, or shorten their descriptions and schemas",
            delivered=False,
            invalid=True,
        )


async def _pause_unless_closed(session: Session, seconds: float) -> None:
    """Sleep, but return early once the episode is closed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not _is_closed(session):
                await session.changed.next_change.wait()


def _is_closed(session: Session) -> bool:
    return session.episode.state is EpisodeState.CLOSED
