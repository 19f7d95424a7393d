"""Paired comparisons: by hand, against scipy's tests, and in simulation."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from flotilla_reading.statistics import paired
from flotilla_reading.statistics.paired import (
    compare_paired,
    difference_interval,
    sign_change_p,
    tasks_needed,
)
from tests.common.domain.test_task_means import DIFFERENT, EQUAL, OPPOSITE, describe, draw_rates


def test_only_common_tasks_with_grades_on_both_sides_count() -> None:
    first = {"a": [0.0, 1.0], "b": [0.0], "c": [1.0], "d": [], "e": [1.0]}
    second = {"a": [1.0, 1.0], "b": [0.0], "c": [0.0, 0.0], "d": [1.0], "f": [1.0]}
    found = compare_paired(first, second)
    assert (found.tasks, found.won, found.lost, found.tied) == (3, 1, 1, 1)
    assert found.difference == pytest.approx((0.5 + 0 - 1) / 3)
    assert found.low < found.difference < found.high
    assert found.p == 1.0, "of -1 and 0.5 every change of signs is as far from 0, or nearly"
    with pytest.raises(ValueError, match="no task"):
        compare_paired(first, {"f": [1.0], "d": [1.0]})


def test_the_p_value_of_few_tasks_is_that_of_all_changes_of_signs() -> None:
    # 2 of 2^6 changes are as far from 0 as six wins; ties say nothing.
    assert sign_change_p([1.0] * 6) == pytest.approx(2 / 64)
    assert sign_change_p([1.0] * 6 + [0.0] * 30) == pytest.approx(2 / 64)
    assert sign_change_p([0.0, 0.0]) == sign_change_p([1.0, 0.0]) == 1.0
    many = [0.1, 0.3, -0.1, 0.2] * 20
    assert sign_change_p(many) == sign_change_p(many) < 0.001


def test_the_p_value_of_many_tasks_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "_RESAMPLES", 999)
    differences = np.random.default_rng(1).normal(0.1, 0.4, 10_000).tolist()
    tracemalloc.start()
    try:
        assert sign_change_p(differences) == 0.002
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_the_interval_is_that_of_the_t_test_but_never_of_width_0() -> None:
    differences = np.random.default_rng(1).normal(0.1, 0.4, 60).tolist()
    known = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert difference_interval(differences) == pytest.approx((known.low, known.high))
    # Newcombe 1998, table I, method 3: 0 of 20.
    assert difference_interval([0.0] * 20) == pytest.approx((-0.1611, 0.1611), abs=5e-5)
    low, high = difference_interval([0.5])
    assert low < 0 < high


@pytest.mark.parametrize(
    "differences", [[1.0] * 5, [0.25] * 5, [1.0, 1.0, 0.9], [-0.5], [-1.0] * 3]
)
def test_tasks_too_few_for_any_p_value_exclude_no_difference(differences: list[float]) -> None:
    low, high = difference_interval(differences)
    assert low < 0 < high
    assert sign_change_p(differences) > 0.05


def test_six_tasks_that_all_gain_show_a_difference() -> None:
    assert difference_interval([1.0] * 6)[0] > 0
    assert sign_change_p([1.0] * 6) < 0.05


def test_power_is_the_published_one() -> None:
    # Cohen 1988, table 2.4.1: 33.4 for d = 0.5 one sample, two-sided 5 %, power 80 %.
    assert tasks_needed(0.5, 1.0) == 34
    assert tasks_needed(-0.05, 0.4) == 505
    assert tasks_needed(0.0, 0.4) is None
    assert tasks_needed(1e-6, 0.4) is None
    assert compare_paired({"a": [0.0]}, {"a": [1.0]}).tasks_to_show(0.1) is None
    # A third more passes at each task: what they differ by is the rounding of thirds.
    before, after = {"a": [1.0, 0.0, 0.0], "b": [1.0, 1.0, 0.0]}, {"a": [1.0, 1.0, 0.0]}
    thirds = compare_paired(before, after | {"b": [1.0] * 3})
    assert thirds.spread != 0
    assert thirds.tasks_to_show(0.02) is None


def draw_pair(
    rng: np.random.Generator,
    cell: tuple[int, int, float, float | None],
    gain: float,
) -> list[float]:
    """Return differences of simulated tasks, of which the second side passes a share `gain` of what
    the first fails."""
    tasks, attempts, mean, concentration = cell
    rates = draw_rates(rng, mean, concentration, tasks)
    better = rng.binomial(attempts, rates + gain * (1 - rates))
    return ((better - rng.binomial(attempts, rates)) / attempts).tolist()


def test_a_difference_is_held_in_about_95_percent_and_none_is_found_where_there_is_none() -> None:
    rng, held, found = np.random.default_rng(0), 0, 0
    for _ in range(100):
        low, high = difference_interval(draw_pair(rng, (60, 4, 0.4, DIFFERENT), 0.2))
        held += low <= 0.2 * 0.6 <= high
        found += sign_change_p(draw_pair(rng, (10, 4, 0.4, DIFFERENT), 0.0)) < 0.05
    assert held >= 90
    assert found <= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "least", "most", "within"),
    [(10, 0.9, 1.0, 30), (20, 0.9, 1.0, 45), (50, 0.925, 0.975, 52), (150, 0.92, 0.975, 52)],
)
def test_paired_intervals_cover_the_truth_in_93_to_97_percent_of_1000_draws(
    tasks: int, least: float, most: float, within: int
) -> None:
    found: dict[tuple[int, float, float | None, float], float] = {}
    for each in product((1, 4, 8), (0.2, 0.5, 0.8), (EQUAL, DIFFERENT, OPPOSITE), (0.0, 0.2)):
        attempts, mean, concentration, gain = each
        rng, truth = np.random.default_rng(0), gain * (1 - mean)
        cell = (tasks, attempts, mean, concentration)
        drawn = [difference_interval(draw_pair(rng, cell, gain)) for _ in range(1000)]
        found[each] = sum(low <= truth <= high for low, high in drawn) / 1000
    print(describe(tasks, list(found.values())))
    outside = {cell: each for cell, each in found.items() if not 0.93 <= each <= 0.97}
    assert len(found) - len(outside) >= within, outside
    assert min(found.values()) >= least, outside
    assert max(found.values()) <= most, outside


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_policy_that_is_no_better_is_called_better_in_at_most_5_percent() -> None:
    for cell in [(12, 1, 0.5, DIFFERENT), (30, 4, 0.3, OPPOSITE), (100, 2, 0.7, EQUAL)]:
        rng = np.random.default_rng(0)
        drawn = [draw_pair(rng, cell, 0.0) for _ in range(1000)]
        found = [each for each in drawn if sign_change_p(each) < 0.05]
        better = sum(sum(each) > 0 for each in found)
        print(f"{cell[0]} tasks: called better in {better / 10:.1f} %, worse {len(found) - better}")
        assert better <= 50, cell
        assert len(found) <= 70, "in both directions, by chance a few more than 50"


def test_no_interval_goes_beyond_what_rewards_allow() -> None:
    keys = [str(n) for n in range(9)]
    found = compare_paired(dict.fromkeys(keys, (0.0,)), dict.fromkeys(keys, (1.0,)))
    assert (found.difference, found.high) == (1.0, 1.0)
    assert 0.5 < found.low < 1.0
    large = compare_paired(dict.fromkeys(keys, (-5.0,)), dict.fromkeys(keys, (1.0,)))
    assert large.difference == 6.0 <= large.high
