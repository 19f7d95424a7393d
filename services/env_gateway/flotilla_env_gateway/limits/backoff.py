"""Waits before a failed request to an environment is repeated, with jitter. No I/O."""

import random


class Backoff:
    """Decorrelated jitter: each wait is uniform in [base, 3 x the last], at most `cap`."""

    def __init__(self, *, base_s: float, cap_s: float, rng: random.Random | None = None) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._uniform = (rng or random).uniform
        self._last_s = base_s

    def reset(self) -> None:
        """Begin with short waits again."""
        self._last_s = self._base_s

    def next_wait_s(self, retry_after_s: float | None = None) -> float:
        self._last_s = min(self._cap_s, self._uniform(self._base_s, self._last_s * 3))
        return max(self._last_s, retry_after_s or 0.0)
