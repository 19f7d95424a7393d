"""How much an environment bears: adaptive concurrency, a circuit breaker, a rate. No I/O; the clock
is an argument, in seconds.
"""

from collections import deque
from enum import StrEnum
from typing import Protocol

_FACTOR = 0.7


class Limit(Protocol):
    """How many may be in flight. Each that begins ends as one of the last three."""

    in_flight: int

    @property
    def limit(self) -> int: ...

    @property
    def full(self) -> bool: ...

    def begin(self) -> int:
        """Give what this returns to `overloaded`."""
        ...

    def succeeded(self) -> None: ...

    def overloaded(self, begun: int) -> None: ...

    def ended(self) -> None:
        """Neither a success nor a sign of overload."""
        ...


class FixedLimit:
    """A limit that learns nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0

    @property
    def full(self) -> bool:
        return self.in_flight >= self.limit

    def begin(self) -> int:
        self.in_flight += 1
        return 0

    def succeeded(self) -> None:
        self.in_flight -= 1

    def overloaded(self, begun: int) -> None:
        self.in_flight -= 1

    def ended(self) -> None:
        self.in_flight -= 1


class AdaptiveLimit:
    """How many may be in flight: additive increase, multiplicative decrease (Chiu and Jain, 1989).

    While the limit is in use each success adds 1 / limit, and 1 until the first overload (slow
    start, RFC 5681). An overload multiplies it by 0.7, but at most once for all that was in flight
    together: what had begun before the limit fell fails for the same reason.
    """

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
    def full(self) -> bool:
        return self.in_flight >= self.limit

    def begin(self) -> int:
        self.in_flight += 1
        return self._falls

    def succeeded(self) -> None:
        used = 2 * self.in_flight >= self.limit
        self.in_flight -= 1
        if used:
            step = 1.0 / self._limit if self._falls else 1.0
            self._limit = min(self._ceiling, self._limit + step)

    def overloaded(self, begun: int) -> None:
        self.in_flight -= 1
        if begun == self._falls:
            self._falls += 1
            self._limit = max(self._least, self._limit * _FACTOR)

    def ended(self) -> None:
        self.in_flight -= 1


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Stops calls for `open_s` when more than `error_rate` of the last `window` failed; then lets
    one through, whose success closes it and whose failure opens it again."""

    def __init__(self, *, window: int, error_rate: float, open_s: float) -> None:
        self._failures: deque[bool] = deque(maxlen=window)
        self._error_rate = error_rate
        self._open_s = open_s
        self._open_until: float | None = None
        self._probing = False
        # Grows with each opening: what began before it says nothing about the time after it.
        self._generation = 0

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def blocked_s(self, now: float) -> float:
        """How long nothing will be let through."""
        return max(0.0, (self._open_until or now) - now)

    def allows(self, now: float) -> bool:
        state = self.state(now)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._probing
        )

    def begin(self, now: float) -> int:
        """Something that is allowed begins; give what this returns to `end`."""
        self._probing = self.state(now) is BreakerState.HALF_OPEN
        return self._generation

    def end(self, generation: int, *, failed: bool | None, now: float) -> None:
        """`failed` None: it says nothing."""
        if generation != self._generation:
            return
        if self._open_until is not None:
            self._end_probe(failed, now)
        elif failed is not None:
            self._failures.append(failed)
            full = len(self._failures) == self._failures.maxlen
            if full and sum(self._failures) > self._error_rate * len(self._failures):
                self._open(now)

    def _end_probe(self, failed: bool | None, now: float) -> None:
        self._probing = False
        if failed:
            self._open(now)
        elif failed is False:
            self._open_until = None
            self._failures.clear()

    def _open(self, now: float) -> None:
        self._generation += 1
        self._probing = False
        self._open_until = now + self._open_s


class TokenBucket:
    """At most `burst` at once and `rate` a second in the long run."""

    def __init__(self, *, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def take(self, now: float) -> float:
        """Take one; returns how many seconds to wait before using it."""
        if self._filled_at is not None:
            gained = (now - self._filled_at) * self._rate
            self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)
