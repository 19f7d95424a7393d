"""Intervals of means over tasks: published values, and how often they hold the truth."""

from collections.abc import Iterator

import numpy as np
import pytest

from services.common.domain.task_means import mean_interval, wilson_interval

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


def grid(sizes: tuple[int, ...]) -> Iterator[tuple[int, int, float, float | None]]:
    for tasks in sizes:
        for attempts in (1, 2, 4, 8):
            for mean in (0.05, 0.2, 0.5, 0.8, 0.95):
                for concentration in (EQUAL, DIFFERENT, OPPOSITE)[: 3 if attempts > 1 else 1]:
                    yield tasks, attempts, mean, concentration


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "least", "most", "within"),
    [((10, 20), 0.89, 0.995, 0.6), ((50,), 0.9, 0.985, 0.8), ((100, 300), 0.92, 0.98, 0.95)],
)
def test_the_interval_covers_the_truth_in_93_to_97_percent_of_1000_draws(
    sizes: tuple[int, ...], least: float, most: float, within: float
) -> None:
    """With 100 tasks and more. With fewer, and a mean near 0 or 1, no method can: there are few
    outcomes, and often no task that differs from the others."""
    found = {cell: coverage(*cell, draws=1000) for cell in grid(sizes)}
    print(f"{len(found)} cells, from {min(found.values())} to {max(found.values())}")
    inside = [0.93 <= each <= 0.97 for each in found.values()]
    print(f"from 0.93 to 0.97: {sum(inside)}")
    outside = {cell: each for cell, each in found.items() if not 0.93 <= each <= 0.97}
    print(outside)
    assert sum(inside) / len(inside) >= within, outside
    assert min(found.values()) >= least, outside
    assert max(found.values()) <= most, outside
