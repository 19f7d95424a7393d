"""Every formula against values worked out by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_common.domain.attempts import AttemptKey, Purpose
from flotilla_common.domain.task_means import mean_interval
from flotilla_common.domain.trajectory import Counts, Trajectory, TurnTiming
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_learner.config.learner import EvalSetConfig
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.groups.batcher import Batch
from flotilla_learner.groups.counters import StepCounters, Tally
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.run.eval_report import TaskResult, eval_metrics, summarize_results
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from flotilla_learner.tracking.metric_formulas import (
    StepTimes,
    candidate_metrics,
    environment_metrics,
    failure_metrics,
    ks_distance,
    reward_metrics,
    staleness_metrics,
    timing_metrics,
    train_throughput,
)
from flotilla_learner.tracking.step_metrics import WINDOW, ThroughputWindow


def group(
    env: str, rewards: list[float], *, oldest: int = 0, counts: Counts | None = None
) -> ReadyGroup:
    spec = GroupSpec(f"{env}{rewards}", 0, Task("t", env, "{}"), Purpose.TRAIN, len(rewards), 1.0)
    turns = (
        TurnTiming(0.5, 0.25, 10, 5, thinking_tokens=4),
        TurnTiming(0.5, 0.75, 10, 5, thinking_tokens=2),
    )
    records = tuple(
        AttemptRecord(
            Trajectory(
                AttemptKey(spec.group_id, number, 0),
                "",
                (),
                b"",
                reward=reward,
                counts=counts or Counts(),
                turns=turns,
            ),
            policy_tokens=10,
            total_tokens=30,
            oldest_version=oldest,
            newest_version=oldest,
        )
        for number, reward in enumerate(rewards)
    )
    return ReadyGroup(spec, records, ())


GROUPS = [
    group("shop", [1.0, 0.0, 0.0, 1.0]),
    group("shop", [0.0, 0.0, 0.0, 0.0]),
    group("desk/a", [0.5, 1.5, 0.5, 0.5]),
]


def test_mended_candidates_are_a_share_of_the_tokens_that_have_candidates() -> None:
    assert candidate_metrics(GROUPS) == {}
    mended = group("shop", [1.0, 0.0], counts=Counts(mended_candidates=3))
    limited = replace(mended, spec=replace(mended.spec, top_k=8))
    # 3 of each attempt's 10 tokens.
    assert candidate_metrics([*GROUPS, limited]) == {"mismatch/mended_candidates": 0.3}


def test_reward_metrics_by_hand() -> None:
    metrics = reward_metrics(GROUPS)
    # Passes are rewards of at least 1: 2 of 4, none, 1 of 4.
    assert metrics["reward/avg_pass_at_1"] == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert metrics["reward/avg_pass_at_4"] == pytest.approx(2 / 3)
    assert metrics["reward/avg_raw_reward"] == pytest.approx((2 + 0 + 3) / 12)
    # Population variances: 0.25, 0, and of (0.5, 1.5, 0.5, 0.5) 3 / 16.
    assert metrics["reward/variance_per_prompt"] == pytest.approx((0.25 + 0 + 0.1875) / 3)


def test_reward_metrics_of_an_environment_by_hand() -> None:
    metrics = reward_metrics(GROUPS)
    assert metrics["reward/shop/signal_ratio"] == 0.5
    assert metrics["reward/shop/pass_at_n"] == 0.5
    assert metrics["reward/shop/pass_at_1"] == 0.25
    assert metrics["reward/shop/variance_per_prompt"] == 0.125
    assert metrics["reward/shop/mean_positive_reward"] == 1.0
    assert metrics["reward/desk_a/mean_positive_reward"] == 0.75
    assert metrics["reward/desk_a/signal_ratio"] == 1.0


def test_environment_metrics_by_hand() -> None:
    counts = Counts(turns=3, tool_calls=4, tool_errors={"bad_tool": 1}, repeats=2, open_s=0.5)
    metrics = environment_metrics(
        [group("shop", [1.0, 0.0], counts=counts)], {"shop": 8}, {"shop": 2}
    )
    assert metrics["environment/shop/avg_turns"] == 3
    assert metrics["environment/shop/avg_tool_calls"] == 4
    assert metrics["environment/shop/avg_thinking_tokens"] == 3
    assert metrics["environment/shop/avg_acting_tokens"] == 2
    assert metrics["environment/shop/tool_error_rate"] == 0.25
    assert metrics["environment/shop/repeat_rate"] == 0.5
    assert metrics["environment/shop/no_grade_rate"] == 0.25
    assert metrics["environment/shop/open_seconds_p50"] == 0.5
    assert metrics["environment/shop/call_seconds_p50"] == 0.5


def test_staleness_is_the_trainers_version_less_the_oldest_that_wrote_a_token() -> None:
    batch = Batch((group("a", [1.0, 0.0], oldest=4), group("a", [1.0, 0.0], oldest=2)), ())
    metrics = staleness_metrics(batch, 5, Tally())
    assert (metrics["async/staleness_mean"], metrics["async/staleness_max"]) == (2, 3)


def test_failures_are_counted_by_kind_and_groups_by_reason() -> None:
    counters = StepCounters(quarantined=1)
    counters.failures["env_lost"] = 3
    counters.dropped_groups["stale"] = 2
    metrics = failure_metrics(counters)
    assert metrics["failures/env_lost"] == 3
    assert metrics["failures/group_stale"] == metrics["async/dropped_stale"] == 2
    assert metrics["failures/quarantined_tasks"] == 1


def test_an_evaluations_figures_by_hand() -> None:
    results = [
        TaskResult("a", (1.0, 0.0, 0.0, 0.0), turns=8, tool_calls=4, tool_errors=1),
        TaskResult("a", (1.0, 1.0), turns=4, tool_calls=4),
        TaskResult("a", (0.5,), turns=2),
    ]
    report = summarize_results(results, (1, 2, 4))
    assert report["pass_at_1"] == pytest.approx((0.25 + 1.0 + 0.0) / 3)
    assert report["pass_at_2"] == pytest.approx((0.5 + 1.0) / 2), "of tasks with two attempts"
    assert report["pass_at_4"] == 1.0
    assert report["avg_score"] == pytest.approx((0.25 + 1.0 + 0.5) / 3)
    assert report["variance_per_prompt"] == pytest.approx((3 / 16 + 0) / 2)
    assert report["signal_ratio"] == 0.5
    assert report["mean_positive_reward"] == pytest.approx(3.5 / 4)
    assert (report["avg_turns"], report["avg_tool_calls"]) == (2.0, 8 / 7)
    assert report["tool_error_rate"] == 0.125
    assert summarize_results([], (1,)) == {"tasks": 0}
    single = summarize_results([TaskResult("a", (0.0,))], (1, 2))
    assert not single.keys() & {"pass_at_2", "variance_per_prompt", "signal_ratio"}
    assert single["mean_positive_reward"] == single["tool_error_rate"] == 0.0


def test_every_pass_at_k_of_an_evaluation_has_its_interval() -> None:
    results = [TaskResult("a", (1.0, 0.0, 0.0, 0.0)), TaskResult("a", (1.0, 1.0))]
    figures = summarize_results(results, (1, 2, 4))
    report = {**figures, "missing": 1, "incomplete": 1, "by_env": {"web/shop": figures}}
    metrics = eval_metrics({"heldout": report, "greedy": report})
    for prefix in ("eval/all", "eval/web_shop", "eval_greedy/all", "eval_greedy/web_shop"):
        for k, of_tasks in ((1, [0.25, 1.0]), (2, [0.5, 1.0]), (4, [1.0])):
            name = f"{prefix}/pass_at_{k}"
            assert (metrics[f"{name}_low"], metrics[f"{name}_high"]) == mean_interval(of_tasks)
        assert metrics[f"{prefix}/avg_turns"] == 0.0
    assert metrics["eval/all/missing"] == metrics["eval_greedy/all/incomplete"] == 1.0


@pytest.mark.parametrize(
    ("attempts", "pass_at", "reported"),
    [
        (3, None, (1, 2, 3)),
        (8, None, (1, 2, 4, 8)),
        (6, None, (1, 2, 4, 6)),
        (8, [3, 5], (1, 3, 5, 8)),
        (3, [], (1, 3)),
        (1, None, (1,)),
    ],
)
def test_pass_at_k_is_reported_for_the_configured_k_and_for_1_and_all_attempts(
    attempts: int, pass_at: list[int] | None, reported: tuple[int, ...]
) -> None:
    values = {"name": "heldout", "tasks": "t.json", "attempts": attempts, "pass_at": pass_at}
    assert parse_config(EvalSetConfig, values, where="set").reported_k == reported


def test_a_k_beyond_the_attempts_is_refused() -> None:
    values = {"name": "heldout", "tasks": "t.json", "attempts": 3, "pass_at": [2, 4]}
    with pytest.raises(ConfigError, match="pass@4 needs as many attempts, but attempts is 3"):
        parse_config(EvalSetConfig, values, where="set")


def test_the_kolmogorov_smirnov_distance_by_hand() -> None:
    assert ks_distance([1, 2, 3], [1, 2, 3]) == 0
    assert ks_distance([1, 2], [3, 4]) == 1
    assert ks_distance([1, 2, 3, 4], [3, 4, 5, 6]) == 0.5
    assert ks_distance([], [1]) == 0


def times(step: float, *, rollout: float = 0.0, train: float = 0.0) -> StepTimes:
    return StepTimes(
        rollout_wait=0.0,
        rollout=rollout,
        train=train,
        publish=0.5,
        sync=None,
        eval_wait=0.0,
        checkpoint=0.5,
        step=step,
    )


def test_the_idle_share_is_what_the_trainer_did_nothing_in() -> None:
    assert timing_metrics(times(10.0, train=4.0))["timing/idle_share"] == 0.5
    assert timing_metrics(times(1.0, train=4.0))["timing/idle_share"] == 0.0


def test_generated_tokens_are_averaged_over_steps_for_they_arrive_in_bursts() -> None:
    """Overlap makes nearly all of a step's tokens arrive during the step before."""
    pace = ThroughputWindow()
    pace.add_step(times(4.0), StepCounters(policy_tokens=8000, trajectories=80))
    figures = pace.add_step(times(2.0), StepCounters(policy_tokens=4, trajectories=0))
    assert figures["throughput/tokens_per_sec_gen"] == pytest.approx(8004 / 6)
    assert figures["throughput/trajectories_per_sec"] == pytest.approx(80 / 6)


def test_old_steps_leave_the_window() -> None:
    pace = ThroughputWindow()
    pace.add_step(times(1.0), StepCounters(policy_tokens=10**9))
    for _ in range(WINDOW - 1):
        pace.add_step(times(1.0), StepCounters(policy_tokens=5))
    figures = pace.add_step(times(1.0), StepCounters(policy_tokens=5))
    assert figures["throughput/tokens_per_sec_gen"] == 5


def test_the_overlap_ratio_is_of_medians() -> None:
    pace = ThroughputWindow()
    for step in (5.0, 60.0):
        pace.add_step(times(step, rollout=4.0, train=2.0), StepCounters())
    figures = pace.add_step(times(5.0, rollout=4.0, train=2.0), StepCounters())
    assert figures["timing/overlap_ratio"] == 1.25


def test_trained_tokens_per_second_leave_filtered_groups_out() -> None:
    batch = Batch((group("a", [1.0, 0.0]),), (group("a", [1.0, 1.0]),))
    metrics = train_throughput(batch, times(1.0, train=2.0))
    assert metrics["throughput/tokens_per_sec_train"] == 30


def test_what_is_not_finite_is_null_in_the_metrics_file(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log_metrics(1, {"a": math.nan, "b": math.inf, "c": 1.0}, {})
    tracker.close()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["a"], line["b"], line["c"], line["step"]) == (None, None, 1.0, 1)
