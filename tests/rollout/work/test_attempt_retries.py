"""Pauses between the tries of an attempt grow."""

import pytest

from services.rollout.work.attempt_retries import choose_pause


@pytest.mark.parametrize("failures", [1, 2, 5])
def test_each_pause_may_be_twice_as_long_as_the_one_before(failures: int) -> None:
    pauses = [choose_pause(0.25, failures) for _ in range(50)]
    most = 0.25 * 2 ** (failures - 1)
    assert most / 2 <= min(pauses) < max(pauses) <= most
