"""A fixed rate with bursts. No I/O; the clock is an argument, in seconds."""

# Whoever slept until a token was there must not miss it by a rounding error.
_ROUNDING = 1e-6


class TokenBucket:
    """Token bucket: at most `burst` at once and `rate` a second in the long run."""

    def __init__(self, *, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def blocked_s(self, now: float) -> float:
        """Return how long, in seconds, there will be no token."""
        if self._filled_at is not None:
            gained = (now - self._filled_at) * self._rate
            self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at = now
        return 0.0 if self._tokens > 1 - _ROUNDING else (1 - self._tokens) / self._rate

    def take_token(self) -> None:
        """Take a token that is there."""
        self._tokens -= 1
