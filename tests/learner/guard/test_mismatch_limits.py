"""The control chart: what it lets pass, and how it climbs and comes down again."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from flotilla_learner.config.guard import GuardConfig
from flotilla_learner.guard.mismatch_limits import (
    BOUNDS,
    MIN_TOKENS,
    ChartRules,
    ChartVerdict,
    ControlChart,
    GuardLevel,
    MismatchBound,
    bound_of,
)
from flotilla_learner.types import VersionMismatch

RULES = ChartRules(
    bound=MismatchBound(mean=1.0, tail=10.0, kl=1.0),
    config=GuardConfig(
        sigmas=4.0, smoothing=0.1, warmup_versions=4, floor=0.01, healthy_versions=3
    ),
)


def measured(size: float = 0.1, *, tokens: int = 1000) -> VersionMismatch:
    """KL and mean of `size`, a tail ten times that."""
    return VersionMismatch(tokens, size, size, 10 * size, 20 * size)


def watched(
    sizes: list[float], chart: ControlChart | None = None
) -> tuple[ControlChart, list[ChartVerdict]]:
    """One version after another, each of one size."""
    chart, verdicts = chart or ControlChart(), list[ChartVerdict]()
    for version, size in enumerate(sizes):
        chart, verdict = chart.observe_versions({version: measured(size)}, RULES)
        verdicts.append(verdict)
    return chart, verdicts


def test_a_run_as_good_as_its_precision_is_only_watched() -> None:
    _, verdicts = watched([0.1, 0.12, 0.09, 0.1, 0.11, 0.1])
    assert all(verdict == ChartVerdict(GuardLevel.WATCH) for verdict in verdicts)


def test_each_version_over_the_bound_is_one_level_more_until_the_run_stops() -> None:
    _, verdicts = watched([0.1, 2.0, 2.0, 2.0])
    assert [v.level for v in verdicts] == [
        GuardLevel.WATCH,
        GuardLevel.MASK,
        GuardLevel.ON_POLICY,
        GuardLevel.STOP,
    ]
    assert [v.resync for v in verdicts] == [False, False, True, False]


def test_an_excess_names_statistic_version_value_and_limit() -> None:
    _, (*_, last) = watched([0.1, 2.0])
    assert str(last.excesses[0]) == "mean of version 1 is 2, the bound 1"
    assert {excess.statistic for excess in last.excesses} == {"mean", "tail", "kl"}


def test_before_there_is_a_history_the_bound_is_the_limit() -> None:
    chart, _ = watched([0.1, 0.1, 0.1])
    assert chart.current_limits(RULES) == (RULES.bound.kl, RULES.bound.tail)


def test_the_limit_follows_the_runs_own_history_below_the_bound() -> None:
    chart, _ = watched([0.1, 0.12, 0.08, 0.1, 0.12, 0.08])
    kl, tail = chart.current_limits(RULES)
    assert 0.12 < kl < 0.5
    assert tail == pytest.approx(10 * kl)


def test_a_run_that_grew_worse_than_it_was_is_masked_and_synchronised_but_never_stopped() -> None:
    chart, _ = watched([0.1, 0.12, 0.08, 0.1, 0.12, 0.08])
    _, verdicts = watched([0.8] * 5, chart)
    assert [v.level for v in verdicts] == [GuardLevel.MASK] + 4 * [GuardLevel.ON_POLICY]
    assert [v.resync for v in verdicts] == [False, True, False, False, False]
    assert not any(excess.hard for verdict in verdicts for excess in verdict.excesses)


def test_what_is_over_a_limit_does_not_move_it() -> None:
    chart, _ = watched([0.1, 0.12, 0.08, 0.1, 0.12, 0.08])
    after, _ = watched([0.8, 0.8, 0.8], chart)
    assert after.current_limits(RULES) == chart.current_limits(RULES)


def test_healthy_versions_take_the_measures_back_one_by_one() -> None:
    chart, _ = watched([0.1, 2.0, 2.0])
    assert chart.level is GuardLevel.ON_POLICY
    _, verdicts = watched([0.1] * 7, chart)
    assert [int(v.level) for v in verdicts] == [2, 2, 1, 1, 1, 0, 0]


def test_one_bad_version_among_healthy_ones_starts_the_count_again() -> None:
    chart, _ = watched([0.1, 2.0, 0.1, 0.1])
    chart, _ = watched([2.0], chart)
    assert (chart.level, chart.healthy) == (GuardLevel.ON_POLICY, 0)


def test_without_enough_tokens_nothing_is_concluded() -> None:
    few = measured(5.0, tokens=MIN_TOKENS - 1)
    chart, verdict = ControlChart().observe_versions({3: few}, RULES)
    assert (chart, verdict) == (ControlChart(), ChartVerdict(GuardLevel.WATCH))
    assert ControlChart().observe_versions({}, RULES) == (
        ControlChart(),
        ChartVerdict(GuardLevel.WATCH),
    )


def test_one_version_of_several_over_the_bound_is_enough() -> None:
    chart, verdict = ControlChart().observe_versions({1: measured(), 2: measured(2.0)}, RULES)
    assert verdict.level is GuardLevel.MASK
    assert {excess.version for excess in verdict.excesses} == {2}
    assert chart.kl.count == 0, "the healthy one must not look as if all had been well"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_no_numbers_agree_with_nothing(value: float) -> None:
    _, verdict = ControlChart().observe_versions({1: replace(measured(), kl=value)}, RULES)
    assert verdict.level is GuardLevel.MASK


def test_perfect_agreement_is_healthy_and_its_limit_is_the_floor() -> None:
    chart, verdicts = watched([0.0] * 8)
    assert {verdict.level for verdict in verdicts} == {GuardLevel.WATCH}
    kl, tail = chart.current_limits(RULES)
    assert kl == pytest.approx(RULES.config.floor * RULES.bound.kl)
    assert tail == pytest.approx(RULES.config.floor * RULES.bound.tail)


def test_a_chart_comes_back_from_the_journal_as_it_was() -> None:
    chart, _ = watched([0.1, 0.2, 2.0, 0.1])
    text = json.dumps(chart.to_state())
    assert ControlChart.from_state(json.loads(text)) == chart
    assert ControlChart.from_state({}) == ControlChart()


def test_a_start_resumes_at_mask_at_most_and_drops_what_is_old_before_it_stops() -> None:
    chart, _ = watched([0.1, 2.0, 2.0, 2.0])
    assert chart.level is GuardLevel.STOP
    chart = ControlChart.from_state(chart.to_state())
    assert chart.observe_versions({4: measured(0.1)}, RULES)[1].level is GuardLevel.MASK
    chart, (first, second) = watched([2.0, 2.0], chart)
    assert (first.level, first.resync) == (GuardLevel.ON_POLICY, True)
    assert second.level is GuardLevel.STOP


@pytest.mark.parametrize("dtype", sorted(BOUNDS))
def test_a_healthy_run_of_a_thousand_versions_raises_no_alarm(dtype: str) -> None:
    """Statistics that scatter by half and drift by a factor of three, as entropy falls."""
    rules = ChartRules(bound_of(GuardConfig(), dtype), GuardConfig())
    rng = np.random.default_rng(0)
    typical = VersionMismatch(2048, rules.bound.kl / 9, 0.0, rules.bound.tail / 5, 0.0)
    chart, levels = ControlChart(), set[GuardLevel]()
    for version in range(1000):
        scale = 3 ** (-version / 1000)
        kl, tail = typical.kl * scale, typical.abs_diff_tail * scale
        found = replace(
            typical,
            kl=kl * math.exp(rng.normal(0, 0.3)),
            abs_diff_tail=tail * math.exp(rng.normal(0, 0.2)),
        )
        chart, verdict = chart.observe_versions({version: found}, rules)
        levels.add(verdict.level)
    assert levels == {GuardLevel.WATCH}
