"""Adaptive concurrency, a circuit breaker and a fixed rate, with a clock that tests advance."""

import random

import pytest

from flotilla_env_gateway.limits.adaptive_concurrency import AdaptiveLimit
from flotilla_env_gateway.limits.circuit_breaker import BreakerState, CircuitBreaker
from flotilla_env_gateway.limits.token_bucket import TokenBucket


def fill(limit: AdaptiveLimit) -> list[int]:
    """Begin as many as allowed."""
    begun: list[int] = []
    while not limit.is_full:
        begun.append(limit.begin_request())
    return begun


def empty(limit: AdaptiveLimit) -> None:
    while limit.in_flight:
        limit.end_without_evidence()


def test_a_limit_in_use_doubles_each_round_until_the_first_overload() -> None:
    limit = AdaptiveLimit(start=4, ceiling=100)
    for expected in (4, 8, 16):
        assert len(fill(limit)) == expected
        for _ in range(expected):
            limit.end_with_success()
            limit.begin_request()
        empty(limit)


def test_after_an_overload_it_falls_by_a_factor_and_grows_by_one_a_round() -> None:
    limit = AdaptiveLimit(start=20, ceiling=100)
    limit.end_with_overload(fill(limit)[0])
    assert limit.limit == 14
    empty(limit)
    for _ in fill(limit):
        limit.end_with_success()
        limit.begin_request()
    assert limit.limit == 14
    limit.end_with_success()
    limit.begin_request()
    limit.end_with_success()
    assert limit.limit == 15


def test_what_was_in_flight_together_makes_it_fall_only_once() -> None:
    limit = AdaptiveLimit(start=20, ceiling=100)
    for begun in fill(limit)[:15]:
        limit.end_with_overload(begun)
    assert limit.limit == 14
    limit.end_with_overload(limit.begin_request())
    assert limit.limit == 9


def test_it_stays_between_one_and_its_ceiling() -> None:
    limit = AdaptiveLimit(start=50, ceiling=8)
    assert limit.limit == 8
    for _ in range(20):
        limit.end_with_overload(limit.begin_request())
    assert (limit.limit, limit.in_flight) == (1, 0)
    for _ in range(1000):
        limit.begin_request()
        limit.end_with_success()
    assert 1 <= limit.limit <= 8


def test_success_far_below_the_limit_does_not_count() -> None:
    limit = AdaptiveLimit(start=10, ceiling=100)
    for _ in range(100):
        limit.begin_request()
        limit.end_with_success()
    assert limit.limit == 10


def test_it_finds_what_a_server_bears_with_few_refusals() -> None:
    """48 callers, 150 ms a call, a server that refuses the 13th at once."""
    rng = random.Random(0)
    limit = AdaptiveLimit(start=8, ceiling=256)
    served = refused = 0
    now = 0.0
    ends: list[float] = []
    while now < 30.0:
        due = sum(end <= now for end in ends)
        ends = [end for end in ends if end > now]
        for _ in range(due):
            limit.end_with_success()
            served += 1
        while not limit.is_full and limit.in_flight < 48:
            begun = limit.begin_request()
            if len(ends) < 12:
                ends.append(now + 0.15 * rng.uniform(0.9, 1.1))
            else:
                limit.end_with_overload(begun)
                refused += 1
        now += 0.005
    possible = 30.0 / 0.15 * 12
    assert served > 0.75 * possible
    assert refused < 0.05 * served


def breaker() -> CircuitBreaker:
    return CircuitBreaker(window=20, error_rate=0.5, open_s=5.0)


def run(of: CircuitBreaker, outcomes: list[bool | None], now: float = 0.0) -> None:
    for failed in outcomes:
        of.end_request(of.begin_request(now), failed=failed, now=now)


def test_a_breaker_opens_when_more_than_half_of_the_window_failed() -> None:
    half = breaker()
    run(half, [True, False] * 10)
    assert half.state_at(0.0) is BreakerState.CLOSED
    run(half, [True])
    assert half.state_at(0.0) is BreakerState.CLOSED
    run(half, [True])
    assert half.state_at(0.0) is BreakerState.OPEN
    assert not half.allows_request(4.9)
    assert half.blocked_s(1.0) == 4.0


def test_too_few_calls_are_no_evidence() -> None:
    young = breaker()
    run(young, [True] * 19)
    run(young, [None] * 50)
    assert young.allows_request(0.0)
    run(young, [True])
    assert not young.allows_request(0.0)


def test_one_probe_decides_whether_it_closes() -> None:
    probed = breaker()
    run(probed, [True] * 20)
    assert probed.state_at(5.0) is BreakerState.HALF_OPEN
    probe = probed.begin_request(5.0)
    assert not probed.allows_request(5.0)
    probed.end_request(probe, failed=True, now=6.0)
    assert not probed.allows_request(10.9)
    probe = probed.begin_request(11.0)
    probed.end_request(probe, failed=False, now=11.5)
    assert probed.state_at(11.5) is BreakerState.CLOSED
    run(probed, [True] * 19, now=12.0)
    assert probed.allows_request(12.0)


def test_a_probe_without_a_result_lets_another_through() -> None:
    probed = breaker()
    run(probed, [True] * 20)
    probed.end_request(probed.begin_request(5.0), failed=None, now=5.1)
    assert probed.allows_request(5.1)


def test_stragglers_from_before_it_opened_decide_nothing() -> None:
    late = breaker()
    straggler = late.begin_request(0.0)
    run(late, [True] * 20)
    late.begin_request(5.0)
    late.end_request(straggler, failed=False, now=5.0)
    assert late.state_at(5.0) is BreakerState.HALF_OPEN
    assert not late.allows_request(5.0)


def test_a_bucket_gives_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=10.0, burst=3)
    for _ in range(3):
        assert bucket.blocked_s(0.0) == 0.0
        bucket.take_token()
    assert bucket.blocked_s(0.0) == pytest.approx(0.1)
    assert bucket.blocked_s(0.04) == pytest.approx(0.06)
    assert bucket.blocked_s(0.1) == 0.0
    bucket.take_token()
    assert bucket.blocked_s(0.1) == pytest.approx(0.1)
    assert bucket.blocked_s(100.0) == 0.0
    for _ in range(3):
        bucket.take_token()
    assert bucket.blocked_s(100.0) > 0.0
