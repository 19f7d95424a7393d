"""Where calls and creations wait until their environment bears one more."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NoReturn

from services.env_gateway.adaptive import AdaptiveLimit, Breaker, BreakerState
from services.env_gateway.ports import BackendError

# Both say that there was too much at once.
_OVERLOAD = {"throttled", "timeout"}

# What the limit and the breaker gave with a place.
_Place = tuple[int, int]


class NoPlaceError(TimeoutError):
    """The wait for a place was over before there was one."""


class Gate:
    """Lets through in order of arrival: as many at once as the limit allows, and none while the
    breaker is open. Learns from what becomes of each."""

    def __init__(self, limit: AdaptiveLimit, breaker: Breaker | None = None) -> None:
        self._limit = limit
        self._breaker = breaker
        self._queue: deque[asyncio.Future[_Place]] = deque()
        self._reopening: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> int:
        return self._limit.limit

    @property
    def in_flight(self) -> int:
        return self._limit.in_flight

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for waiter in self._queue)

    @property
    def breaker(self) -> BreakerState:
        return self._breaker.state(_now()) if self._breaker else BreakerState.CLOSED

    @asynccontextmanager
    async def passing(self, until: float) -> AsyncGenerator[None]:
        """Wait for a place and hold it; NoPlaceError at `until`. Raises BackendError at once when
        the breaker is open for longer than that."""
        place = await self._enter(until)
        try:
            yield
        except BackendError as error:
            self._failed(place, error)
            raise
        except BaseException:
            self._limit.ended()
            self._leave(place, failed=None)
            raise
        self._limit.succeeded()
        self._leave(place, failed=False)

    async def _enter(self, until: float) -> _Place:
        now = _now()
        if now >= until:
            # Nobody's fault here, and no evidence against the environment.
            raise NoPlaceError
        if self._breaker is not None and now + self._breaker.blocked_s(now) > until:
            _refuse(self._breaker.blocked_s(now))
        if not self._queue and self._open(now):
            return self._begin(now)
        waiter: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        self._let_in()
        try:
            async with asyncio.timeout_at(until):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                # The place came in the same moment as the end of the wait.
                self._limit.ended()
                self._leave(waiter.result(), failed=None)
            if isinstance(error, TimeoutError):
                raise NoPlaceError from None
            raise

    def _failed(self, place: _Place, error: BackendError) -> None:
        if error.kind in _OVERLOAD:
            self._limit.overloaded(place[0])
        else:
            self._limit.ended()
        told = error.invalid or error.bad_arguments or error.lost or error.kind == "throttled"
        self._leave(place, failed=None if told else True)

    def _leave(self, place: _Place, *, failed: bool | None) -> None:
        if self._breaker is not None:
            self._breaker.end(place[1], failed=failed, now=_now())
        self._let_in()

    def _let_in(self) -> None:
        now = _now()
        while self._queue and (self._queue[0].done() or self._open(now)):
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(self._begin(now))
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

    def _begin(self, now: float) -> _Place:
        generation = self._breaker.begin(now) if self._breaker is not None else 0
        return self._limit.begin(), generation


def _refuse(blocked_s: float) -> NoReturn:
    raise BackendError(
        "unavailable",
        f"most calls of this environment failed lately; none is made for {blocked_s:.1f} s",
        delivered=False,
        retry_after_s=blocked_s,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
