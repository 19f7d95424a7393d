"""Gates at which calls and creations wait until their environment has capacity for one more."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from services.common.deadlines import loop_time
from services.env_gateway.limits.adaptive_concurrency import ConcurrencyLimit
from services.env_gateway.limits.backend_health import HealthEvidence, RequestObserver
from services.env_gateway.limits.circuit_breaker import BreakerState, CircuitBreaker
from services.env_gateway.limits.fair_queue import FairQueue, WeightOf, equal_weight
from services.env_gateway.ports import BackendError

_OVERLOAD = {HealthEvidence.THROTTLED, HealthEvidence.SILENT}
_FAILED = {HealthEvidence.SUCCESS: False, HealthEvidence.SILENT: True, HealthEvidence.FAILED: True}


@dataclass(frozen=True, slots=True)
class _Place:
    """One request's place. `begun` belongs to the limit, `generation` to the breaker."""

    run_id: str
    begun: int
    generation: int


class NoPlaceError(TimeoutError):
    """The wait for a place ended before one was free."""


@dataclass(slots=True)
class Passage:
    """A held place at a gate, for one request of a `kind` to an instance."""

    kind: str
    instance_id: str
    observer: RequestObserver | None
    sent_at: float | None = None
    evidence: HealthEvidence = HealthEvidence.NOTHING

    def mark_sent(self) -> None:
        """Mark the request as sent: its waiting time before is not the backend's fault."""
        self.sent_at = loop_time()

    def mark_answered(self) -> None:
        if self.observer:
            self.evidence = self.observer.observe_answer(
                self.kind, self.instance_id, self._seconds_since_sent()
            )

    def mark_failed(self, error: BackendError) -> None:
        if self.observer:
            seconds = self._seconds_since_sent()
            self.evidence = self.observer.observe_failure(
                error, self.kind, self.instance_id, seconds
            )

    def mark_given_up(self) -> None:
        if self.observer:
            self.evidence = self.observer.observe_silence(
                self.kind, self.instance_id, self._seconds_since_sent()
            )

    def _seconds_since_sent(self) -> float:
        return 0.0 if self.sent_at is None else loop_time() - self.sent_at


class Gate:
    """Gate that admits as many requests at once as the limit allows, and none while the
    breaker is open. Runs get fair shares by weight; within a run the order is that of
    arrival. It learns from the end of each request, as far as the observer sees it."""

    def __init__(
        self,
        limit: ConcurrencyLimit,
        breaker: CircuitBreaker | None = None,
        *,
        observer: RequestObserver | None = None,
        weight_of: WeightOf = equal_weight,
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
    def breaker_state(self) -> BreakerState:
        return self._breaker.state_at(loop_time()) if self._breaker else BreakerState.CLOSED

    @asynccontextmanager
    async def hold_place(
        self, run_id: str, until: float, *, kind: str = "", instance_id: str = ""
    ) -> AsyncGenerator[Passage]:
        """Wait for a place and hold it; NoPlaceError at `until`. Raises BackendError at once if
        the breaker stays open for longer than that."""
        place = await self._enter_queue(run_id, until)
        passage = Passage(kind, instance_id, self._observer)
        try:
            yield passage
            passage.mark_answered()
        except BackendError as error:
            passage.mark_failed(error)
            raise
        except asyncio.CancelledError:
            passage.mark_given_up()
            raise
        finally:
            self._end_request(place, passage.evidence)

    async def _enter_queue(self, run_id: str, until: float) -> _Place:
        now = loop_time()
        if now >= until:
            # Not a fault, and no evidence against the environment.
            raise NoPlaceError
        if self._breaker is not None and now + self._breaker.blocked_s(now) > until:
            _raise_unavailable(self._breaker.blocked_s(now))
        if not self._queue and self._has_room(now):
            self._queue.take_place(run_id)
            return self._begin_request(run_id, now)
        waiter: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._queue.push(run_id, waiter)
        self._let_in()
        return await self._wait_for_place(run_id, waiter, until)

    async def _wait_for_place(
        self, run_id: str, waiter: asyncio.Future[_Place], until: float
    ) -> _Place:
        try:
            async with asyncio.timeout_at(until):
                return await waiter
        except BaseException as error:
            self._queue.discard(run_id, waiter)
            if waiter.done() and not waiter.cancelled():
                # The place came in the same moment as the end of the wait.
                self._end_request(waiter.result(), HealthEvidence.NOTHING)
            if isinstance(error, TimeoutError):
                raise NoPlaceError from None
            raise

    def _end_request(self, place: _Place, evidence: HealthEvidence) -> None:
        if evidence is HealthEvidence.SUCCESS:
            self._limit.end_with_success()
        elif evidence in _OVERLOAD:
            self._limit.end_with_overload(place.begun)
        else:
            self._limit.end_without_evidence()
        self._queue.give_back(place.run_id)
        if self._breaker is not None:
            self._breaker.end_request(
                place.generation, failed=_FAILED.get(evidence), now=loop_time()
            )
        self._let_in()

    def _let_in(self) -> None:
        now = loop_time()
        while self._queue and self._has_room(now):
            run_id, waiter = self._queue.pop()
            if waiter.done():
                # Cancelled, but it has not left the queue yet.
                self._queue.give_back(run_id)
            else:
                waiter.set_result(self._begin_request(run_id, now))
        if self._queue and self._breaker is not None and self._reopening is None:
            self._wake_at_reopening(now, self._breaker.blocked_s(now))

    def _wake_at_reopening(self, now: float, blocked_s: float) -> None:
        if blocked_s > 0:
            loop = asyncio.get_running_loop()
            self._reopening = loop.call_at(now + blocked_s, self._on_reopening)

    def _on_reopening(self) -> None:
        self._reopening = None
        self._let_in()

    def _has_room(self, now: float) -> bool:
        return not self._limit.is_full and (
            self._breaker is None or self._breaker.allows_request(now)
        )

    def _begin_request(self, run_id: str, now: float) -> _Place:
        generation = self._breaker.begin_request(now) if self._breaker is not None else 0
        return _Place(run_id, self._limit.begin_request(), generation)


def _raise_unavailable(blocked_s: float) -> NoReturn:
    raise BackendError(
        "unavailable",
        f"most calls of this environment failed lately; none is made for {blocked_s:.1f} s",
        delivered=False,
        retry_after_s=blocked_s,
    )
