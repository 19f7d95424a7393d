"""Brings an episode from its place in the queue to READY."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from services.common.log import get_logger
from services.common.watchdog import Watchdog
from services.env_gateway import meters
from services.env_gateway.computer import Scale, screen_of
from services.env_gateway.config import EnvGatewayConfig
from services.env_gateway.episodes import EpisodeBook, State
from services.env_gateway.journal import Journal
from services.env_gateway.offer import COMPUTER, NothingToOfferError, offered
from services.env_gateway.ports import BackendError, Instance, Provision, Tool
from services.env_gateway.retry import Backoff
from services.env_gateway.session import Session
from services.env_gateway.tasks import SINGLE_TURN

_LOG = get_logger(__name__)
# An instance that ends itself must outlive the episode and its grading.
_TTL_MARGIN_S = 120.0
_BASE_S, _CAP_S = 0.1, 10.0
_WARMING_CAP_S = 2.0
_TOOLS_CHARS = 2**19

T = TypeVar("T")


class Opener:
    """Creates instances, at most `limits.max_creating` at once. `created` counts those asked for,
    whether or not they came to be."""

    def __init__(
        self,
        config: EnvGatewayConfig,
        book: EpisodeBook,
        journal: Journal,
        rng: random.Random,
        watchdog: Watchdog,
        scale: Scale,
    ) -> None:
        self._scale = scale
        self._config = config
        self._book = book
        self._journal = journal
        self._rng = rng
        self._watchdog = watchdog
        self._creating = asyncio.Semaphore(config.limits.max_creating)
        self.created = 0

    async def open(self, session: Session) -> None:
        """Leaves the episode READY, or `failure` set. An episode that is closed meanwhile ends
        with what was created in `session.instance`, for the closer to delete."""
        started = _now()
        try:
            while not session.ticket.admitted and not _closed(session):
                await session.changed.wait()
            async with self._creating:
                with self._watchdog.stage("create environment"):
                    await self._provision(session)
            with self._watchdog.stage("warm environment"):
                await self._warm(session)
        except BackendError as error:
            self._fail(session, str(error))
        except Exception as error:  # noqa: BLE001
            # A server may answer what no adapter foresaw: whoever waits must hear of it.
            _LOG.exception("open_failed", episode_id=session.episode.episode_id)
            self._fail(session, f"the gateway failed: {error!r}")
        session.open_s = _now() - started
        meters.open_seconds(session.env_key)(session.open_s)
        session.changed.notify()

    async def _provision(self, session: Session) -> None:
        if _closed(session):
            return
        episode = session.episode
        self._enter(session, State.PROVISIONING)
        self._journal.creating(episode.episode_id, backend=session.backend_name)
        session.journaled = True
        self.created += 1
        request = Provision(
            episode.episode_id, episode.spec.task, episode.ends_at - _now() + _TTL_MARGIN_S
        )
        session.instance = await self._retried(
            session,
            lambda timeout_s: session.backend.provision(request, timeout_s=timeout_s),
            cap_s=_CAP_S,
        )
        self._journal.created(episode.episode_id, session.instance.instance_id)

    async def _warm(self, session: Session) -> None:
        instance = session.instance
        if instance is None or _closed(session):
            return
        self._enter(session, State.WARMING)
        if session.episode.spec.task.modality != SINGLE_TURN:
            await self._meet(session, instance)
        if not _closed(session):
            self._book.ready(session.episode, _now())

    async def _meet(self, session: Session, instance: Instance) -> None:
        """Wait until the instance has tools, and for what it shows first."""
        tools = await self._retried(
            session,
            lambda timeout_s: instance.list_tools(timeout_s=timeout_s),
            cap_s=_WARMING_CAP_S,
        )
        _check_size(tools)
        self._offer(session, tools)
        shown = await self._retried(
            session,
            lambda timeout_s: instance.observe(timeout_s=timeout_s),
            cap_s=_WARMING_CAP_S,
        )
        if session.screen is not None:
            shown = await session.screen.shown_parts(shown)
        session.first_observation = session.media.keep(tuple(shown))

    def _offer(self, session: Session, tools: Sequence[Tool]) -> None:
        try:
            chosen = offered(tools, session.episode.spec.task)
        except NothingToOfferError as error:
            raise BackendError("no_tools", str(error), delivered=False, invalid=True) from error
        config = self._config.screen_of(session.env_key)
        session.screen = screen_of(chosen, config, self._scale)
        if session.screen is not None:
            chosen[COMPUTER] = session.screen.describe(chosen[COMPUTER])
        session.tools = chosen

    async def _retried(
        self, session: Session, attempt: Callable[[float], Awaitable[T]], *, cap_s: float
    ) -> T:
        """Both creation and readiness are safe to ask for again, until the time to open is over
        or nobody waits for the episode any more."""
        until = min(_now() + self._config.open_timeout_s, session.episode.ends_at)
        backoff = Backoff(base_s=_BASE_S, cap_s=cap_s, rng=self._rng)
        while True:
            try:
                return await attempt(max(0.001, until - _now()))
            except BackendError as error:
                failure = error
            wait_s = backoff.next(failure.retry_after_s)
            final = failure.invalid or failure.lost or _now() + wait_s >= until
            if final or _closed(session):
                raise failure
            _LOG.info("open_retried", episode_id=session.episode.episode_id, error=str(failure))
            await asyncio.sleep(wait_s)
            if _closed(session):
                raise failure

    def _enter(self, session: Session, state: State) -> None:
        session.episode.advance(state)
        session.changed.notify()

    def _fail(self, session: Session, detail: str) -> None:
        session.failure = detail
        if not _closed(session):
            session.episode.advance(State.FAILED, detail)


def _check_size(tools: Sequence[Tool]) -> None:
    """All tools go to the worker in one message."""
    size = sum(len(t.name + t.description + t.input_schema_json) for t in tools)
    if size > _TOOLS_CHARS:
        raise BackendError(
            "too_large",
            f"{len(tools)} tools take {size} characters, and no more than {_TOOLS_CHARS} can be "
            "offered; have the server list fewer, or shorten their descriptions and schemas",
            delivered=False,
            invalid=True,
        )


def _closed(session: Session) -> bool:
    return session.episode.state is State.CLOSED


def _now() -> float:
    return asyncio.get_running_loop().time()
