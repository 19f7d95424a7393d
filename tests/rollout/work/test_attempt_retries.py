"""A failed attempt is retried as often as the learner allows, after ever longer pauses."""

import pytest

from services.rollout.work.attempt_retries import AttemptRetries


@pytest.mark.parametrize(("first", "most", "left"), [(0, 3, [0, 1, 2]), (2, 3, [2]), (3, 3, [])])
def test_a_lease_makes_only_the_tries_that_earlier_ones_have_left(
    first: int, most: int, left: list[int]
) -> None:
    assert list(AttemptRetries(first, most, 0.5).tries_left()) == left


@pytest.mark.parametrize("failures", [0, 1, 4])
def test_each_pause_may_be_twice_as_long_as_the_one_before(failures: int) -> None:
    retries = AttemptRetries(2, 9, 0.5)
    pauses = [retries.pause_after(2 + failures) for _ in range(50)]
    assert 0.25 * 2**failures <= min(pauses) < max(pauses) <= 0.5 * 2**failures
