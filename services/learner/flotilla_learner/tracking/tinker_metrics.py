"""Metrics of a step under the names of the reference's entry point for Tinker: a run with
`learner.engine = "tinker"` logs them next to ours, of which some have the same names.

r is an attempt's reward. An attempt lasts from the opening of its environment to its grade.
Attempts run concurrently, so the sum of their seconds exceeds the seconds that passed."""

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import StopReason
from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.tracking.histograms import episode_seconds
from flotilla_learner.tracking.metric_formulas import StepTimes, group_by_env

_CUT_OFF = (StopReason.CONTEXT_OVERFLOW, StopReason.GENERATION_LENGTH)


def tinker_metrics(
    groups: Sequence[ReadyGroup], times: StepTimes, epoch: float
) -> dict[str, float]:
    """Return the metrics of a step on `groups`, after `epoch` passes over the tasks. Those of its
    advantages, see `advantage_metrics`, are in the step's result."""
    return {
        "epoch": float(int(epoch)),
        **_attempt_metrics(groups),
        **_environment_metrics(groups),
        **_time_metrics([record for group in groups for record in group.graded], times),
    }


def _attempt_metrics(groups: Sequence[ReadyGroup]) -> dict[str, float]:
    """Return rewards and counts of the step's attempts.

    - reward/mean_positive_reward: mean of the r > 0 of graded groups, or 0
    - rollouts/valid: graded attempts; invalid: tries without a grade; total: both
    - rollouts/truncated_overlong: graded attempts that a limit of length cut off"""
    attempts = [record.trajectory for group in groups for record in group.graded]
    graded = [group for group in groups if not group.is_judged]
    positive = [r for group in graded for r in group.rewards if r > 0]
    invalid = sum(len(group.failed) for group in groups)
    return {
        "reward/mean_positive_reward": fmean(positive) if positive else 0.0,
        "rollouts/valid": float(len(attempts)),
        "rollouts/invalid": float(invalid),
        "rollouts/total": float(len(attempts) + invalid),
        "rollouts/truncated_overlong": float(
            sum(attempt.stop_reason in _CUT_OFF for attempt in attempts)
        ),
    }


def advantage_metrics(advantages: Iterable[NDArray[np.floating]]) -> dict[str, float]:
    """Return advantage/mean and advantage/std, the mean and the population standard deviation of
    the advantages of a step's sequences: each the mean over its policy tokens, of which it may
    have none."""
    means = [float(values.mean()) for values in advantages if len(values)]
    return {"advantage/mean": fmean(means), "advantage/std": pstdev(means)} if means else {}


def _environment_metrics(groups: Sequence[ReadyGroup]) -> dict[str, float]:
    """Return figures by environment, over its graded attempts.

    - reward/{env}/pass_at_{n}: fraction of groups with a pass, n the size of the step's largest
    - rollout/{env}/turns, tool_calls, tool_errors, duration: means; duration in seconds
    - rollout/{env}/tool_error_rate: calls with an outcome other than ok / calls"""
    size, metrics = max(len(group.rewards) for group in groups), dict[str, float]()
    for env, own in group_by_env(groups).items():
        records = [record for group in own for record in group.graded]
        counts = [record.trajectory.counts for record in records]
        calls = sum(each.tool_calls for each in counts)
        errors = sum(sum(each.tool_errors.values()) for each in counts)
        if graded := [group for group in own if not group.is_judged]:
            passed = sum(max(group.rewards) >= PASS_REWARD for group in graded)
            metrics[f"reward/{env}/pass_at_{size}"] = passed / len(graded)
        metrics |= {
            f"rollout/{env}/turns": fmean(each.turns for each in counts),
            f"rollout/{env}/tool_calls": calls / len(counts),
            f"rollout/{env}/tool_errors": errors / len(counts),
            f"rollout/{env}/duration": fmean(map(episode_seconds, records)),
            f"rollout/{env}/tool_error_rate": errors / max(1, calls),
        }
    return metrics


def _time_metrics(records: Sequence[AttemptRecord], times: StepTimes) -> dict[str, float]:
    """Return seconds of the graded attempts and of the step, and tokens per second.

    - rollout/avg_duration, max_duration, min_duration: seconds of an attempt
    - time/rollout, time/train, time/total: as timing/rollout, timing/train, timing/step
    - time/gen_total, gen_mean: seconds of sampling, sum and mean over attempts
    - time/step_total, step_mean: the same for the environment, its tools and the grade
    - time/gen_pct, step_pct: these sums in percent of the seconds of all attempts
    - throughput/tokens_total: policy tokens; tokens_per_sec_gen and tokens_per_sec_effective: by
      the sum of the seconds of sampling, and of all seconds, so per concurrent attempt"""
    lasted = [episode_seconds(record) for record in records]
    turns = [record.trajectory.turns for record in records]
    sampled = sum(turn.generate_s for each in turns for turn in each)
    in_tools = sum(turn.tools_s for each in turns for turn in each)
    stepped = in_tools + sum(record.trajectory.counts.grade_s for record in records)
    tokens, count = sum(record.policy_tokens for record in records), len(records)
    return {
        "rollout/avg_duration": fmean(lasted),
        "rollout/max_duration": max(lasted),
        "rollout/min_duration": min(lasted),
        "time/rollout": times.rollout,
        "time/train": times.train,
        "time/total": times.step,
        "time/gen_total": sampled,
        "time/gen_mean": sampled / count,
        "time/step_total": stepped,
        "time/step_mean": stepped / count,
        "time/gen_pct": 100 * _ratio(sampled, sum(lasted)),
        "time/step_pct": 100 * _ratio(stepped, sum(lasted)),
        "throughput/tokens_total": float(tokens),
        "throughput/tokens_per_sec_gen": _ratio(tokens, sampled),
        "throughput/tokens_per_sec_effective": _ratio(tokens, sum(lasted)),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
