"""Each alarm is raised by its cause, names it, and is not raised by noise."""

import random
from typing import Any

import pytest

from flotilla_learner.alarms.types import ALL, Severity
from tests.support.alarm_steps import alarms, facts


def test_a_run_that_is_well_raises_nothing() -> None:
    raiser, heard = alarms()
    for step in range(1, 40):
        raiser.judge_step(facts(step))
    assert heard.names == []


CASES: dict[str, tuple[dict[str, Any], dict[str, float], str]] = {
    "signal_ratio/shop": ({"signal": {"shop": (1, 8)}}, {}, "4 of 32 (12%) groups"),
    "no_grade_rate/shop": ({"no_grade": {"shop": (8, 32)}}, {}, "32 of 128 (25%) tries"),
    "tool_error_rate/shop": (
        {},
        {"environment/shop/tool_error_rate": 0.8},
        "80% of the tool calls",
    ),
    "stale_drops/all": ({"stale": (4, 12)}, {}, "16 of 48 (33%) groups"),
    "skipped_update/all": ({}, {"policy/skipped": 1.0}, "loss or gradient is not finite"),
    "given_up_tasks/shop": ({"given_up": {"shop": 1}}, {}, "3 of its tasks"),
    "refused_tasks/shop": ({"refused": {"shop": 8}}, {}, "refused to open 16 tries"),
    "mismatch_guard/all": ({}, {"mismatch/guard_level": 1.0}, "far off get no gradient"),
    "upload_failing/all": ({}, {"checkpoint/upload_failures": 2.0}, "2 uploads of checkpoints"),
    "staleness_over/all": ({}, {"async/staleness_max": 2.0}, "2 versions old; the bound is 1"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_alarm_is_raised_once_names_its_figure_and_is_cleared_when_all_is_well(
    name: str,
) -> None:
    raiser, heard = alarms()
    changes, metrics, words = CASES[name]
    for step in range(1, 9):
        raiser.judge_step(facts(step, metrics, **changes))
    assert heard.names == [f"+{name}"]
    verdict = heard.alarms[0].verdict
    assert words in verdict.cause
    assert verdict.fix
    for step in range(9, 30):
        raiser.judge_step(facts(step))
    assert heard.names == [f"+{name}", f"-{name}"]
    assert raiser.raised == []


BASELINES: dict[str, tuple[dict[str, Any], dict[str, float], str]] = {
    "length_collapse/shop": ({"lengths": {"shop": 20.0}}, {}, "20 tokens of the policy, and had"),
    "length_explosion/shop": ({"lengths": {"shop": 400.0}}, {}, "325 tokens of the policy"),
    "entropy_collapse/all": ({}, {"policy/entropy": 0.05}, "0.05 nats a token, and was 1 at"),
}


@pytest.mark.parametrize("name", BASELINES)
def test_lengths_and_entropy_are_compared_with_the_start_of_the_run(name: str) -> None:
    raiser, heard = alarms()
    changes, metrics, words = BASELINES[name]
    for step in range(1, 5):
        raiser.judge_step(facts(step))
    for step in range(5, 12):
        raiser.judge_step(facts(step, metrics, **changes))
    assert heard.names == [f"+{name}"]
    assert words in heard.alarms[0].verdict.cause


def test_a_resumed_run_is_still_compared_with_its_own_start() -> None:
    raiser, _ = alarms()
    for step in range(1, 5):
        raiser.judge_step(facts(step))
    resumed, heard = alarms(remembered=raiser.memory)
    for step in range(5, 12):
        resumed.judge_step(facts(step, {"policy/entropy": 0.01}))
    assert heard.names == ["+entropy_collapse/all"]


def test_staleness_near_the_bound_is_reported_when_it_stays_there() -> None:
    raiser, heard = alarms(max_staleness=4)
    for step in range(1, 9):
        near = {"async/staleness_mean": 3.9, "async/staleness_max": 4.0}
        raiser.judge_step(facts(step, near if step > 4 else {}))
    assert heard.names == ["+staleness_near/all"]


def test_one_bad_step_is_noise() -> None:
    raiser, heard = alarms()
    for step in range(1, 30):
        bad = step % 10 == 5
        changes: dict[str, Any] = {"signal": {"shop": (0, 8)}, "no_grade": {"shop": (4, 32)}}
        changes |= {"stale": (2, 8), "lengths": {"shop": 150.0}}
        raiser.judge_step(
            facts(step, {"policy/entropy": 0.3} if bad else {}, **changes if bad else {})
        )
    assert heard.names == []


def test_an_environment_with_few_groups_a_step_is_not_judged_by_a_few() -> None:
    """One group a step at a true share of one half: 4 in a row without signal happen all the
    time, 12 of 16 hardly ever."""
    chooser = random.Random(0)
    raiser, heard = alarms()
    for step in range(1, 300):
        groups = {"rare": (int(chooser.random() < 0.6), 1), "shop": (4, 8)}
        raiser.judge_step(facts(step, signal=groups))
    assert heard.names == []


def test_a_share_at_its_limit_does_not_flap() -> None:
    raiser, heard = alarms()
    for step in range(1, 60):
        # 25 % on average, a little more and a little less by turns of a window.
        part = 1 if step // 4 % 2 else 2
        raiser.judge_step(facts(step, signal={"shop": (part, 7)}))
    assert heard.names == ["+signal_ratio/shop"]


def test_all_environments_together_are_judged_beside_each() -> None:
    raiser, heard = alarms()
    for step in range(1, 9):
        raiser.judge_step(facts(step, signal={"desk": (0, 8), "shop": (1, 8)}))
    assert set(heard.names) == {f"+signal_ratio/{env}" for env in (ALL, "desk", "shop")}


@pytest.mark.parametrize(
    ("passes", "advice"), [(0.02, "The tasks are too hard"), (0.6, "too easy or too hard")]
)
def test_lack_of_signal_shows_whether_tasks_are_too_hard_or_easy(
    passes: float, advice: str
) -> None:
    raiser, heard = alarms()
    for step in range(1, 9):
        metrics = {"reward/shop/pass_at_1": passes}
        raiser.judge_step(facts(step, metrics, signal={"shop": (0, 8)}))
    assert heard.names == ["+signal_ratio/shop"]
    assert advice in heard.alarms[0].verdict.fix
    assert f"{passes:.0%} of its attempts pass" in heard.alarms[0].verdict.cause


def test_a_solved_environment_is_good_news_and_no_alarm() -> None:
    raiser, heard = alarms()
    for step in range(1, 9):
        metrics = {"reward/web_shop/pass_at_1": 0.97}
        raiser.judge_step(facts(step, metrics, signal={"web/shop": (0, 8)}))
    assert heard.names == ["+solved/web/shop"]
    assert heard.alarms[0].verdict.severity is Severity.NOTICE
    assert "97% of its attempts passed" in heard.alarms[0].verdict.cause
    assert raiser.count == 0
    for step in range(9, 17):
        raiser.judge_step(facts(step, signal={"web/shop": (0, 8)}))
    assert sorted(heard.names[1:]) == ["+signal_ratio/web/shop", "-solved/web/shop"]
