"""Where calls and creations wait until their environment bears one more."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from services.env_gateway.limits.adaptive_concurrency import Breaker, BreakerState, Limit
from services.env_gateway.limits.backend_health import Evidence, Observer
from services.env_gateway.limits.fair_queue import FairQueue, WeightOf, equally
from services.env_gateway.ports import BackendError

_OVERLOAD = {Evidence.THROTTLED, Evidence.SILENT}
_FAILED = {Evidence.SUCCESS: False, Evidence.SILENT: True, Evidence.FAILED: True}


@dataclass(frozen=True, slots=True)
class _Place:
    """`begun` is the limit's, `generation` the breaker's."""

    run_id: str
    begun: int
    generation: int


class NoPlaceError(TimeoutError):
    """The wait for a place was over before there was one."""


@dataclass(slots=True)
class Passage:
    """A place at a gate while it is held, for one request of a `kind` to an instance."""

    kind: str
    instance_id: str
    observer: Observer | None
    sent_at: float | None = None
    evidence: Evidence = Evidence.NOTHING

    def sent(self) -> None:
        """From now on the backend has the request: what it waited for before is not its fault."""
        self.sent_at = _now()

    def answered(self) -> None:
        if self.observer:
            self.evidence = self.observer.answered(self.kind, self.instance_id, self._seconds())

    def failed(self, error: BackendError) -> None:
        if self.observer:
            seconds = self._seconds()
            self.evidence = self.observer.failed(error, self.kind, self.instance_id, seconds)

    def given_up(self) -> None:
        if self.observer:
            self.evidence = self.observer.unanswered(self.kind, self.instance_id, self._seconds())

    def _seconds(self) -> float:
        return 0.0 if self.sent_at is None else _now() - self.sent_at


class Gate:
    """Lets through as many at once as the limit allows, and none while the breaker is open. Runs
    get fair shares by weight; within a run it goes by order of arrival. Learns from what becomes
    of each, as far as the observer sees it."""

    def __init__(
        self,
        limit: Limit,
        breaker: Breaker | None = None,
        *,
        observer: Observer | None = None,
        weight_of: WeightOf = equally,
    ) -> None:
        self._limit = limit
        self._breaker = breaker
        self._observer = observer
        self._queue: FairQueue[asyncio.Future[_Place]] = FairQueue(weight_of)
        self._reopening: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> int:
        return self._limit.limit

    @property
    def in_flight(self) -> int:
        return self._limit.in_flight

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def breaker(self) -> BreakerState:
        return self._breaker.state(_now()) if self._breaker else BreakerState.CLOSED

    @asynccontextmanager
    async def passing(
        self, run_id: str, until: float, *, kind: str = "", instance_id: str = ""
    ) -> AsyncGenerator[Passage]:
        """Wait for a place and hold it; NoPlaceError at `until`. Raises BackendError at once when
        the breaker is open for longer than that."""
        place = await self._enter(run_id, until)
        passage = Passage(kind, instance_id, self._observer)
        try:
            yield passage
            passage.answered()
        except BackendError as error:
            passage.failed(error)
            raise
        except asyncio.CancelledError:
            passage.given_up()
            raise
        finally:
            self._end(place, passage.evidence)

    async def _enter(self, run_id: str, until: float) -> _Place:
        now = _now()
        if now >= until:
            # Nobody's fault here, and no evidence against the environment.
            raise NoPlaceError
        if self._breaker is not None and now + self._breaker.blocked_s(now) > until:
            _refuse(self._breaker.blocked_s(now))
        waiter: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._queue.push(run_id, waiter)
        self._let_in()
        if waiter.done():
            # No wait, and no timer for it.
            return waiter.result()
        return await self._wait(run_id, waiter, until)

    async def _wait(self, run_id: str, waiter: asyncio.Future[_Place], until: float) -> _Place:
        try:
            async with asyncio.timeout_at(until):
                return await waiter
        except BaseException as error:
            self._queue.discard(run_id, waiter)
            if waiter.done() and not waiter.cancelled():
                # The place came in the same moment as the end of the wait.
                self._end(waiter.result(), Evidence.NOTHING)
            if isinstance(error, TimeoutError):
                raise NoPlaceError from None
            raise

    def _end(self, place: _Place, evidence: Evidence) -> None:
        if evidence is Evidence.SUCCESS:
            self._limit.succeeded()
        elif evidence in _OVERLOAD:
            self._limit.overloaded(place.begun)
        else:
            self._limit.ended()
        self._queue.give_back(place.run_id)
        if self._breaker is not None:
            self._breaker.end(place.generation, failed=_FAILED.get(evidence), now=_now())
        self._let_in()

    def _let_in(self) -> None:
        now = _now()
        while self._queue and self._open(now):
            run_id, waiter = self._queue.pop()
            if waiter.done():
                # Cancelled, and not yet back to leave the queue by itself.
                self._queue.give_back(run_id)
            else:
                waiter.set_result(self._begin(run_id, now))
        if self._queue and self._breaker is not None and self._reopening is None:
            self._wake_at_reopening(now, self._breaker.blocked_s(now))

    def _wake_at_reopening(self, now: float, blocked_s: float) -> None:
        if blocked_s > 0:
            loop = asyncio.get_running_loop()
            self._reopening = loop.call_at(now + blocked_s, self._reopened)

    def _reopened(self) -> None:
        self._reopening = None
        self._let_in()

    def _open(self, now: float) -> bool:
        return not self._limit.full and (self._breaker is None or self._breaker.allows(now))

    def _begin(self, run_id: str, now: float) -> _Place:
        generation = self._breaker.begin(now) if self._breaker is not None else 0
        return _Place(run_id, self._limit.begin(), generation)


def _refuse(blocked_s: float) -> NoReturn:
    raise BackendError(
        "unavailable",
        f"most calls of this environment failed lately; none is made for {blocked_s:.1f} s",
        delivered=False,
        retry_after_s=blocked_s,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
