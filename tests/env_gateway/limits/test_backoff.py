"""Waits between retries."""

from hypothesis import given
from hypothesis import strategies as st

from flotilla_env_gateway.limits.backoff import Backoff


@given(st.floats(0.01, 1.0), st.integers(0, 2**32), st.none() | st.floats(0, 100))
def test_waits_stay_within_their_bounds(base: float, seed: int, after: float | None) -> None:
    import random

    backoff = Backoff(base_s=base, cap_s=5.0, rng=random.Random(seed))
    for _ in range(20):
        wait = backoff.next_wait_s(after)
        assert wait >= base and wait >= (after or 0)
        assert wait <= max(5.0, after or 0)
