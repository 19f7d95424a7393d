"""Circuit breaker: closed to calls while a backend fails. No I/O; the clock is an argument."""

from collections import deque
from enum import StrEnum


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
        # Grows with each opening: requests begun before it are no evidence about the time after.
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
