"""Token bucket, which limits calls per second. No I/O; the clock is an argument."""


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
