"""Gates at which requests wait until their environment has capacity for one more."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from flotilla_common.rpc.deadlines import loop_time
from flotilla_env_gateway.limits.adaptive_concurrency import ConcurrencyLimit
from flotilla_env_gateway.limits.backend_health import HealthEvidence, RequestObserver
from flotilla_env_gateway.limits.circuit_breaker import BreakerState, CircuitBreaker
from flotilla_env_gateway.limits.fair_queue import FairQueue, WeightOf, equal_weight
from flotilla_env_gateway.limits.refusal_pace import PacedRequest, RefusalPace
from flotilla_env_gateway.limits.shared_places import SharedPlaces
from flotilla_env_gateway.limits.token_bucket import TokenBucket
from flotilla_env_gateway.ports import BackendError

# A measured rate may be this far below the true one; nobody is sent away because of that.
_RATE_MARGIN = 1.1
_OVERLOAD = {HealthEvidence.THROTTLED, HealthEvidence.SILENT}
_FAILED = {HealthEvidence.SUCCESS: False, HealthEvidence.SILENT: True, HealthEvidence.FAILED: True}


@dataclass(frozen=True, slots=True)
class _Place:
    """One request's place. `begun` belongs to the limit, `generation` to the breaker, and `paced`
    to the pace."""

    run_id: str
    begun: int
    generation: int
    paced: PacedRequest | None


@dataclass(eq=False, frozen=True, slots=True)
class _Waiter:
    """A request that waits for its place until a deadline."""

    place: asyncio.Future[_Place]
    until: float


class NoPlaceError(TimeoutError):
    """The wait for a place ended before one was free, or would; then the message says why."""


@dataclass(slots=True)
class Passage:
    """A held place at a gate since `sent_at`, for one request of a `kind` to an instance."""

    kind: str
    instance_id: str
    observer: RequestObserver | None
    sent_at: float
    evidence: HealthEvidence = HealthEvidence.NOTHING

    @property
    def seconds(self) -> float:
        return loop_time() - self.sent_at

    def mark_answered(self) -> None:
        if self.observer:
            self.evidence = self.observer.observe_answer(self.kind, self.instance_id, self.seconds)

    def mark_failed(self, error: BackendError) -> None:
        if self.observer:
            self.evidence = self.observer.observe_failure(
                error, self.kind, self.instance_id, self.seconds
            )

    def mark_given_up(self) -> None:
        if self.observer:
            self.evidence = self.observer.observe_silence(self.kind, self.instance_id, self.seconds)


class Gate:
    """Gate that admits as many requests at once as the limit and the shared places allow, at most
    at the rate, and none while the breaker is open. Runs get fair shares by weight; within a run
    the order is that of arrival. It learns from the end of each request, as far as the observer
    sees it: a refusal lowers the limit or, where there is one, the pace. `name` distinguishes
    gates with the same shared places."""

    def __init__(
        self,
        limit: ConcurrencyLimit,
        breaker: CircuitBreaker | None = None,
        *,
        rate: TokenBucket | None = None,
        pace: RefusalPace | None = None,
        shared: SharedPlaces | None = None,
        name: str = "",
        observer: RequestObserver | None = None,
        weight_of: WeightOf = equal_weight,
    ) -> None:
        self._limit = limit
        self._breaker = breaker
        self._rate = rate
        self._pace = pace
        self._shared = shared
        self.name = name
        self._observer = observer
        self._queue: FairQueue[_Waiter] = FairQueue(weight_of)
        self._waking: asyncio.TimerHandle | None = None
        if shared is not None:
            shared.add_gate(self)

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

    def describe_pace(self) -> str:
        """Describe the rate to which refusals keep requests, or return "" while it is unknown."""
        per_s = self._pace.admitted_per_s if self._pace is not None else None
        return "" if per_s is None else f"about {per_s:.2g} a second are admitted"

    def list_waiting_runs(self) -> list[str]:
        """Return the runs with waiting requests, the next one first."""
        return self._queue.shares.ordered_runs()

    @asynccontextmanager
    async def hold_place(
        self,
        run_id: str,
        until: float,
        *,
        kind: str = "",
        instance_id: str = "",
        returning: bool = False,
    ) -> AsyncGenerator[Passage]:
        """Wait for a place and hold it; NoPlaceError at `until`, or at once if the pace shows that
        it would come too late. One that is `returning` after a refusal is the first of its run.
        Raises BackendError at once if the breaker stays open until then."""
        place = await self._enter_queue(run_id, until, returning=returning)
        passage = Passage(kind, instance_id, self._observer, loop_time())
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
            if self._pace is not None and passage.evidence is HealthEvidence.SUCCESS:
                self._pace.end_with_answer(passage.seconds)
            self._end_request(place, passage.evidence)

    def let_in(self) -> bool:
        """Let in who may enter; return True if any did."""
        now, entered = loop_time(), False
        while (run_id := self._next_run(now)) is not None:
            waiter = self._queue.pop(run_id)
            if waiter.place.done():
                # Cancelled, but it has not left the queue yet.
                self._queue.give_back(run_id)
            else:
                waiter.place.set_result(self._begin_request(run_id, now))
                entered = True
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        if self._queue and (blocked_s := self._blocked_s(now)) > 0:
            loop = asyncio.get_running_loop()
            self._waking = loop.call_at(now + blocked_s, self.let_in)
        return entered

    async def _enter_queue(self, run_id: str, until: float, *, returning: bool) -> _Place:
        now = loop_time()
        if now >= until:
            # Not a fault, and no evidence against the environment.
            raise NoPlaceError
        if self._breaker is not None and now + self._breaker.blocked_s(now) > until:
            _raise_unavailable(self._breaker.blocked_s(now))
        if not returning and (why := self._explain_lateness(run_id, until, now)):
            raise NoPlaceError(why)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), until)
        self._queue.push(run_id, waiter, first=returning)
        self.let_in()
        return await self._wait_for_place(run_id, waiter)

    def _explain_lateness(self, run_id: str, until: float, now: float) -> str:
        """Return why a request that comes now would be answered too late, or "" if that is not
        known."""
        per_s = self._pace.admitted_per_s if self._pace is not None else None
        if self._pace is None or per_s is None:
            return ""
        took_s, turn_s, ahead = self._pace.fastest_answer_s, 1 / (_RATE_MARGIN * per_s), 0
        for waiter in self._queue.waiting_of(run_id):
            # Those that will leave at their deadlines take nobody's turn.
            ahead += now + ahead * turn_s + took_s <= waiter.until
        ahead += self._queue.count_others(run_id, ahead)
        if now + ahead * turn_s + took_s <= until:
            return ""
        return (
            f"refused as it entered the queue: {self.describe_pace()}, {ahead} are before it, each "
            f"takes {took_s:.1f} s, and {until - now:.1f} s are left"
        )

    async def _wait_for_place(self, run_id: str, waiter: _Waiter) -> _Place:
        place = waiter.place
        if place.done():
            return place.result()
        try:
            async with asyncio.timeout_at(waiter.until):
                return await place
        except BaseException as error:
            self._queue.discard(run_id, waiter)
            if place.done() and not place.cancelled():
                # The place came in the same moment as the end of the wait.
                self._end_request(place.result(), HealthEvidence.NOTHING)
            if isinstance(error, TimeoutError):
                raise NoPlaceError from None
            raise

    def _end_request(self, place: _Place, evidence: HealthEvidence) -> None:
        now = loop_time()
        if evidence is HealthEvidence.SUCCESS:
            self._limit.end_with_success()
        elif evidence is HealthEvidence.THROTTLED and self._pace is not None and place.paced:
            self._pace.end_with_refusal(place.paced, now)
            self._limit.end_without_evidence()
        elif evidence in _OVERLOAD:
            self._limit.end_with_overload(place.begun)
        else:
            self._limit.end_without_evidence()
        self._queue.give_back(place.run_id)
        if self._breaker is not None:
            self._breaker.end_request(place.generation, failed=_FAILED.get(evidence), now=now)
        if self._shared is not None:
            # Every gate may now let in more, this one too.
            self._shared.give_back((self.name, place.run_id))
        else:
            self.let_in()

    def _blocked_s(self, now: float) -> float:
        bounds = (self._breaker, self._rate, self._pace)
        return max(0.0 if one is None else one.blocked_s(now) for one in bounds)

    def _next_run(self, now: float) -> str | None:
        """Return the run whose next request may begin now."""
        if not self._queue or self._limit.is_full or self._blocked_s(now) > 0:
            return None
        if self._breaker is not None and not self._breaker.allows_request(now):
            return None
        shared, runs = self._shared, self.list_waiting_runs()
        if shared is None:
            return runs[0]
        return next((run for run in runs if shared.may_take((self.name, run))), None)

    def _begin_request(self, run_id: str, now: float) -> _Place:
        generation = self._breaker.begin_request(now) if self._breaker is not None else 0
        if self._rate is not None:
            self._rate.take_token()
        if self._shared is not None:
            self._shared.take_place((self.name, run_id))
        paced = self._pace.begin_request(now) if self._pace is not None else None
        return _Place(run_id, self._limit.begin_request(), generation, paced)


def _raise_unavailable(blocked_s: float) -> NoReturn:
    raise BackendError(
        "unavailable",
        f"most calls of this environment failed lately; none is made for {blocked_s:.1f} s",
        delivered=False,
        retry_after_s=blocked_s,
    )
