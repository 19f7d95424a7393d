"""Limits on the load of an environment: adaptive concurrency, a circuit breaker, a rate. No
I/O; the clock is an argument, in seconds."""

from collections import deque
from enum import StrEnum
from typing import Protocol

_FACTOR = 0.7


class ConcurrencyLimit(Protocol):
    """Limit on the requests in flight. Each request that begins ends with one of the last
    three methods."""

    in_flight: int

    @property
    def limit(self) -> int: ...

    @property
    def is_full(self) -> bool: ...

    def begin_request(self) -> int:
        """Begin a request; pass the returned number to `end_with_overload`."""
        ...

    def end_with_success(self) -> None: ...

    def end_with_overload(self, begun: int) -> None: ...

    def end_without_evidence(self) -> None:
        """End a request that shows neither success nor overload."""
        ...


class FixedLimit:
    """A limit that learns nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self.limit

    def begin_request(self) -> int:
        self.in_flight += 1
        return 0

    def end_with_success(self) -> None:
        self.in_flight -= 1

    def end_with_overload(self, begun: int) -> None:
        self.in_flight -= 1

    def end_without_evidence(self) -> None:
        self.in_flight -= 1


class AdaptiveLimit:
    """Limit on the requests in flight by additive increase, multiplicative decrease (Chiu and
    Jain, 1989).

    While the limit is in use each success adds 1 / limit, and 1 until the first overload
    (slow start, RFC 5681). An overload multiplies it by 0.7, but at most once for all
    requests that were in flight together: those that began before the limit fell fail for
    the same reason."""

    def __init__(self, *, start: int, ceiling: int, least: int = 1) -> None:
        self._limit = float(min(start, ceiling))
        self._ceiling = ceiling
        self._least = float(min(least, start, ceiling))
        self._falls = 0
        self.in_flight = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self.limit

    def begin_request(self) -> int:
        self.in_flight += 1
        return self._falls

    def end_with_success(self) -> None:
        used = 2 * self.in_flight >= self.limit
        self.in_flight -= 1
        if used:
            step = 1.0 / self._limit if self._falls else 1.0
            self._limit = min(self._ceiling, self._limit + step)

    def end_with_overload(self, begun: int) -> None:
        self.in_flight -= 1
        if begun == self._falls:
            self._falls += 1
            self._limit = max(self._least, self._limit * _FACTOR)

    def end_without_evidence(self) -> None:
        self.in_flight -= 1


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Circuit breaker: blocks requests for `open_s` after more than `error_rate` of the last
    `window` failed. It then admits one, whose success closes the circuit and whose failure
    opens it again."""

    def __init__(self, *, window: int, error_rate: float, open_s: float) -> None:
        self._failures: deque[bool] = deque(maxlen=window)
        self._error_rate = error_rate
        self._open_s = open_s
        self._open_until: float | None = None
        self._probing = False
        # Grows with each opening: what began before it says nothing about the time after it.
        self._generation = 0

    def state_at(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def blocked_s(self, now: float) -> float:
        """Return how long, in seconds, no request will be admitted."""
        return max(0.0, (self._open_until or now) - now)

    def allows_request(self, now: float) -> bool:
        state = self.state_at(now)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._probing
        )

    def begin_request(self, now: float) -> int:
        """Begin an admitted request; pass the returned number to `end_request`."""
        self._probing = self.state_at(now) is BreakerState.HALF_OPEN
        return self._generation

    def end_request(self, generation: int, *, failed: bool | None, now: float) -> None:
        """End a request. `failed` is None if its end is no evidence."""
        if generation != self._generation:
            return
        if self._open_until is not None:
            self._end_probe(failed, now)
        elif failed is not None:
            self._failures.append(failed)
            full = len(self._failures) == self._failures.maxlen
            if full and sum(self._failures) > self._error_rate * len(self._failures):
                self._open_circuit(now)

    def _end_probe(self, failed: bool | None, now: float) -> None:
        self._probing = False
        if failed:
            self._open_circuit(now)
        elif failed is False:
            self._open_until = None
            self._failures.clear()

    def _open_circuit(self, now: float) -> None:
        self._generation += 1
        self._probing = False
        self._open_until = now + self._open_s


class TokenBucket:
    """Token bucket: at most `burst` at once and `rate` a second in the long run."""

    def __init__(self, *, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def take_token(self, now: float) -> float:
        """Take one token; return the seconds to wait before using it."""
        if self._filled_at is not None:
            gained = (now - self._filled_at) * self._rate
            self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)
