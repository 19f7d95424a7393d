"""Intervals of means over tasks: published values, and how often they hold the truth."""

from collections.abc import Sequence

import numpy as np
import pytest

from flotilla_common.domain.task_means import mean_interval, wilson_interval

# Concentrations of the Beta distribution that tasks' pass rates are drawn from; None: all equal.
EQUAL, DIFFERENT, OPPOSITE = None, 2.0, 0.5


def test_wilson_intervals_are_the_published_ones() -> None:
    # Newcombe 1998, table I, method 3.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0 / 20, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_attempts_at_one_task_are_no_further_tasks() -> None:
    once = mean_interval([1.0] * 10 + [0.0] * 10)
    assert once == pytest.approx(wilson_interval(0.5, 19.1), abs=1e-3), "as without clusters"
    alike = mean_interval([0.5] * 20)
    assert alike[1] - alike[0] < (once[1] - once[0]) / 2, "attempts that differ are worth more"
    assert mean_interval([0.0] * 20) == wilson_interval(0.0, 20)


def test_one_task_tells_little_and_none_nothing() -> None:
    low, high = mean_interval([0.5])
    assert low < 0.1
    assert high > 0.9
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])


def draw_rates(
    rng: np.random.Generator, mean: float, concentration: float | None, tasks: int
) -> np.ndarray:
    if concentration is None:
        return np.full(tasks, mean)
    return rng.beta(mean * concentration, (1 - mean) * concentration, tasks)


def coverage(
    tasks: int, attempts: int, mean: float, concentration: float | None, draws: int
) -> float:
    """Return how often the interval of simulated attempts holds the mean of all such tasks."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(draws):
        passed = rng.binomial(attempts, draw_rates(rng, mean, concentration, tasks))
        low, high = mean_interval((passed / attempts).tolist())
        held += low <= mean <= high
    return held / draws


def test_the_interval_holds_the_truth_in_about_95_percent() -> None:
    for concentration in (EQUAL, DIFFERENT, OPPOSITE):
        assert 0.9 <= coverage(60, 4, 0.4, concentration, 200) <= 0.995


def describe(tasks: int, found: Sequence[float]) -> str:
    """Say how often intervals were right, over cells of a grid."""
    inside = sum(0.93 <= each <= 0.97 for each in found)
    ends = f"lowest {min(found):.1%}, highest {max(found):.1%}"
    return f"{tasks} tasks: {inside} of {len(found)} cells from 93 to 97 %, {ends}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "least", "most", "within"),
    [
        # With few tasks, or a mean near 0 or 1, few outcomes are possible.
        (10, 0.9, 0.99, 25),
        (20, 0.91, 0.98, 40),
        (50, 0.9, 0.98, 40),
        (100, 0.92, 0.98, 45),
        (300, 0.925, 0.975, 49),
    ],
)
def test_the_interval_covers_the_truth_in_93_to_97_percent_of_1000_draws(
    tasks: int, least: float, most: float, within: int
) -> None:
    cells = [
        (tasks, attempts, mean, concentration)
        for attempts in (1, 2, 4, 8)
        for mean in (0.05, 0.2, 0.5, 0.8, 0.95)
        for concentration in ((EQUAL, DIFFERENT, OPPOSITE) if attempts > 1 else (EQUAL,))
    ]
    found = [coverage(*cell, draws=1000) for cell in cells]
    print(describe(tasks, found))
    outside = [each for each in zip(cells, found, strict=True) if not 0.93 <= each[1] <= 0.97]
    assert len(found) - len(outside) >= within, outside
    assert min(found) >= least, outside
    assert max(found) <= most, outside
