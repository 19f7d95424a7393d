"""Names and formulas of the metrics of one step.

r is an attempt's reward, groups are the attempts at one task, a pass is r >= 1. A `/` in an
environment's name becomes `_`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.groups.batcher import Batch
from flotilla_learner.groups.counters import StepCounters, Tally
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.groups.staleness import STALE


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step's stages, named like their metrics; `step` runs from the end of the
    previous step to its own end."""

    rollout_wait: float
    # From the first lease of the step's groups to the end of the last.
    rollout: float
    train: float
    # Writing the weights and scoring the canary.
    publish: float
    # From the last announcement before this step until every engine served it.
    sync: float | None
    # Delay of the publication by an evaluation of the previous policy.
    eval_wait: float
    checkpoint: float
    step: float


def reward_metrics(groups: Sequence[ReadyGroup]) -> dict[str, float]:
    """Return `reward/*`, over all graded groups of the step, including those without signal. Judged
    ones are in `judge_score_metrics` alone.

    - avg_pass_at_{n}: fraction of groups with a pass, n the largest group's size
    - avg_pass_at_1: mean over groups of the fraction of attempts that pass
    - avg_raw_reward: mean r over attempts
    - variance_per_prompt: mean over groups of the population variance of r
    - by environment also signal_ratio: fraction of groups with variance > 0, and
      mean_positive_reward: mean of the r > 0, or 0; with an environment that rewards turns,
      mean_turn_reward: mean over the rewarded turns of graded attempts; with a verifier that
      returns named rewards, named/{name}: mean over the graded attempts that have the name
    """
    groups = [group for group in groups if not group.is_judged]
    if not groups:
        return {}
    size = max(len(group.rewards) for group in groups)
    every = [r for group in groups for r in group.rewards]
    metrics = {
        f"reward/avg_pass_at_{size}": _mean(max(g.rewards) >= PASS_REWARD for g in groups),
        "reward/avg_pass_at_1": _pass_at_1(groups),
        "reward/avg_raw_reward": _mean(every),
        "reward/variance_per_prompt": _mean(float(np.var(g.rewards)) for g in groups),
    }
    for env, own in group_by_env(groups).items():
        prefix = f"reward/{env}"
        positive = [r for g in own for r in g.rewards if r > 0]
        metrics[f"{prefix}/pass_at_n"] = _mean(max(g.rewards) >= PASS_REWARD for g in own)
        metrics[f"{prefix}/pass_at_1"] = _pass_at_1(own)
        metrics[f"{prefix}/variance_per_prompt"] = _mean(float(np.var(g.rewards)) for g in own)
        metrics[f"{prefix}/signal_ratio"] = _mean(g.has_signal for g in own)
        metrics[f"{prefix}/mean_positive_reward"] = _mean(positive)
        metrics |= _further_rewards(prefix, [r.trajectory for g in own for r in g.graded])
    return metrics


def judge_score_metrics(groups: Sequence[ReadyGroup]) -> dict[str, float]:
    """Return `judge/{env}/*` over the step's judged groups; empty without any. A score s compares
    the attempts of one group, so no figure compares groups.

    - spread: mean over groups of the population standard deviation of s
    - signal_ratio: fraction of groups whose s differ
    - best_minus_mean: mean over groups of the largest s minus the mean s"""
    metrics: dict[str, float] = {}
    for env, own in group_by_env([group for group in groups if group.is_judged]).items():
        prefix = f"judge/{env}"
        metrics[f"{prefix}/spread"] = _mean(float(np.std(g.rewards)) for g in own)
        metrics[f"{prefix}/signal_ratio"] = _mean(g.has_signal for g in own)
        best = (max(g.rewards) - _mean(g.rewards) for g in own)
        metrics[f"{prefix}/best_minus_mean"] = _mean(best)
    return metrics


def _further_rewards(prefix: str, attempts: Sequence[Trajectory]) -> dict[str, float]:
    """Return the means of what environments and verifiers give beside the reward."""
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        for turn in attempt.turns:
            if turn.reward is not None:
                found.setdefault("mean_turn_reward", []).append(turn.reward)
        for name, reward in sorted(attempt.named_rewards.items()):
            found.setdefault(f"named/{name}", []).append(reward)
    return {f"{prefix}/{name}": _mean(rewards) for name, rewards in found.items()}


def environment_metrics(
    groups: Sequence[ReadyGroup], tries: Mapping[str, int], no_grade: Mapping[str, int]
) -> dict[str, float]:
    """Return `environment/{env}/*` over the step's graded attempts.

    - avg_turns, avg_tool_calls, avg_policy_tokens: means over attempts
    - avg_thinking_tokens, avg_acting_tokens: per turn, means over all turns
    - tool_error_rate: calls with an outcome other than ok / calls
    - repeat_rate: calls that repeat an earlier one / calls
    - no_grade_rate: tries without a known grade / tries, since the previous step
    - open_seconds_p50/p95: until the episode was ready
    - call_seconds_p50/p95: a turn's time in tools
    """
    metrics: dict[str, float] = {}
    for env, own in group_by_env(groups).items():
        attempts = [record.trajectory for group in own for record in group.graded]
        calls = sum(t.counts.tool_calls for t in attempts)
        errors = sum(sum(t.counts.tool_errors.values()) for t in attempts)
        prefix = f"environment/{env}"
        metrics[f"{prefix}/avg_turns"] = _mean(t.counts.turns for t in attempts)
        metrics[f"{prefix}/avg_tool_calls"] = _mean(t.counts.tool_calls for t in attempts)
        tokens = [record.policy_tokens for group in own for record in group.graded]
        metrics[f"{prefix}/avg_policy_tokens"] = _mean(tokens)
        turns = [turn for t in attempts for turn in t.turns]
        thought = [turn.thinking_tokens for turn in turns]
        acted = [turn.generated_tokens - turn.thinking_tokens for turn in turns]
        metrics[f"{prefix}/avg_thinking_tokens"] = _mean(thought)
        metrics[f"{prefix}/avg_acting_tokens"] = _mean(acted)
        metrics[f"{prefix}/tool_error_rate"] = errors / max(1, calls)
        metrics[f"{prefix}/repeat_rate"] = sum(t.counts.repeats for t in attempts) / max(1, calls)
        opened = [t.counts.open_s for t in attempts]
        called = [turn.tools_s for turn in turns if turn.tools_s > 0]
        metrics.update(_quantile_metrics(f"{prefix}/open_seconds", opened))
        metrics.update(_quantile_metrics(f"{prefix}/call_seconds", called))
    ungraded = Counter(no_grade)
    for env, count in tries.items():
        metrics[f"environment/{_env_label(env)}/no_grade_rate"] = ungraded[env] / max(1, count)
    return metrics


def candidate_metrics(groups: Sequence[ReadyGroup]) -> dict[str, float]:
    """Return `mismatch/mended_candidates`: the share of the policy's tokens that the engine had not
    listed among the candidates that it sampled from. Empty if none of the groups has candidates."""
    limited = [record for group in groups if group.spec.top_k for record in group.graded]
    if not limited:
        return {}
    mended = sum(record.trajectory.counts.mended_candidates for record in limited)
    tokens = sum(record.policy_tokens for record in limited)
    return {"mismatch/mended_candidates": mended / max(1, tokens)}


def staleness_metrics(batch: Batch, version: int, tally: Tally) -> dict[str, float]:
    """Return `async/*` except the counts of dropped groups.

    Staleness of an attempt: the trainer's version at the step's start minus the oldest version
    that wrote any of it. `drop_bias_ks` is the Kolmogorov-Smirnov distance between the lengths
    (in policy tokens) of recent stale attempts and of recent trained ones: 0 when dropping is
    blind to length, up to 1."""
    lags = [
        version - oldest for r in _graded_records(batch) if (oldest := r.oldest_version) is not None
    ]
    return {
        "async/staleness_mean": _mean(lags),
        "async/staleness_max": float(max(lags, default=0)),
        "async/drop_bias_ks": ks_distance(tally.stale_lengths, tally.trained_lengths),
    }


def failure_metrics(counters: StepCounters) -> dict[str, float]:
    """Return `failures/{kind}`: failed tries by kind, those that the env_gateway refused to open,
    dropped groups by reason, and tasks that were given up, since the previous step."""
    metrics = {f"failures/{kind}": float(n) for kind, n in counters.failures.items()}
    for reason, count in counters.dropped_groups.items():
        metrics[f"failures/group_{reason}"] = float(count)
    metrics["failures/refused_by_gateway"] = float(counters.refused.total())
    metrics["failures/quarantined_tasks"] = float(counters.quarantined)
    metrics["async/dropped_stale"] = float(counters.dropped_groups[STALE])
    return metrics


def timing_metrics(times: StepTimes) -> dict[str, float]:
    """Return `timing/*` in seconds, and shares of the step.

    `idle_share` is 1 - (train + publish + checkpoint) / step, not below 0: the part of the step
    in which the trainer was idle.
    """
    busy = times.train + times.publish + times.checkpoint
    known = {f"timing/{name}": value for name, value in asdict(times).items() if value is not None}
    return known | {"timing/idle_share": max(0.0, 1.0 - busy / times.step) if times.step else 0.0}


def train_throughput(batch: Batch, times: StepTimes) -> dict[str, float]:
    """Return tokens of all trained sequences, including prompts, per second of training."""
    trained = sum(r.total_tokens for group in batch.groups for r in group.graded)
    return {"throughput/tokens_per_sec_train": trained / max(times.train, 1e-9)}


def cost_metrics(batch: Batch, counters: StepCounters) -> dict[str, float]:
    """Return `cost/*`, in tokens that a policy wrote, since the previous step.

    - sampled_tokens: received ones, including those of evaluations and of failed tries
    - trained_tokens: those of the attempts that the step trains on
    - dropped_tokens: those of groups that were dropped for any reason
    """
    trained = sum(r.policy_tokens for group in batch.groups for r in group.graded)
    return {
        "cost/sampled_tokens": float(counters.policy_tokens),
        "cost/trained_tokens": float(trained),
        "cost/dropped_tokens": float(counters.dropped_tokens),
    }


def ks_distance(first: Iterable[float], second: Iterable[float]) -> float:
    """Return the two-sample Kolmogorov-Smirnov statistic; 0 if either sample is empty."""
    a, b = np.sort(np.fromiter(first, float)), np.sort(np.fromiter(second, float))
    if not len(a) or not len(b):
        return 0.0
    points = np.concatenate([a, b])
    below_a = np.searchsorted(a, points, side="right") / len(a)
    below_b = np.searchsorted(b, points, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def _graded_records(batch: Batch) -> list[AttemptRecord]:
    return [record for group in batch.all_groups for record in group.graded]


def group_by_env(groups: Sequence[ReadyGroup]) -> dict[str, list[ReadyGroup]]:
    """Sort groups by environment, as it is named in metrics."""
    found: dict[str, list[ReadyGroup]] = {}
    for group in groups:
        found.setdefault(_env_label(group.spec.task.env_key), []).append(group)
    return dict(sorted(found.items()))


def _pass_at_1(groups: Sequence[ReadyGroup]) -> float:
    return _mean(_mean(r >= PASS_REWARD for r in group.rewards) for group in groups)


def _quantile_metrics(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    middle, high = np.quantile(values, [0.5, 0.95])
    return {f"{name}_p50": float(middle), f"{name}_p95": float(high)}


def _env_label(env: str) -> str:
    return env.replace("/", "_")


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(sum(found) / len(found)) if found else 0.0
