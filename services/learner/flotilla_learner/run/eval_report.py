"""Evaluation: fixed tasks, sampled from exactly one policy, never trained on."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import pvariance
from typing import Any, Literal

from flotilla_common.domain.attempts import Purpose
from flotilla_common.domain.eval_groups import MAIN_SET, eval_group_id
from flotilla_common.domain.pass_rates import PASS_REWARD, pass_at_k
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.task_means import mean_interval
from flotilla_learner.config.learner import EvalMoment
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.groups.graded_attempts import ReadyGroup
from flotilla_learner.sampling.eval_sets import EvalSet
from flotilla_learner.sampling.group_signal import has_signal

# `eval_only` is the evaluation of all sets in mode `eval`.
Moment = EvalMoment | Literal["eval_only"]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Graded attempts at one task: their rewards, and sums over all of them."""

    env_key: str
    rewards: Sequence[float]
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0

    @property
    def attempts(self) -> int:
        return len(self.rewards)

    @property
    def passed(self) -> int:
        return sum(reward >= PASS_REWARD for reward in self.rewards)


class Evaluation:
    """One evaluation of one policy over several sets."""

    def __init__(self, moment: Moment, policy: PolicyId, sets: Sequence[EvalSet]) -> None:
        self.moment: Moment = moment
        self.policy = policy
        self.eval_id = f"{moment}-{policy.run_epoch}-{policy.version}"
        self.done = asyncio.Event()
        self.on_progress: Callable[[], None] = lambda: None
        self._sets = [s for s in sets if moment == "eval_only" or moment in s.config.when]
        self._set_of: dict[str, str] = {}
        self._results: dict[str, TaskResult] = {}
        self.specs = [spec for chosen in self._sets for spec in self._make_groups(chosen)]

    def add_group(self, group: ReadyGroup) -> None:
        """Add a finished group; groups of other evaluations are ignored."""
        group_id = group.spec.group_id
        if group_id not in self._set_of:
            return
        self._results[group_id] = _task_result(group)
        self.on_progress()
        if len(self._results) == len(self._set_of):
            self.done.set()

    @property
    def unfinished_groups(self) -> list[str]:
        return [group_id for group_id in self._set_of if group_id not in self._results]

    @property
    def num_samples(self) -> int:
        """Number of graded attempts of the main set so far."""
        found = (r for i, r in self._results.items() if self._set_of[i] == MAIN_SET)
        return sum(result.attempts for result in found)

    def build_report(self) -> dict[str, Any]:
        """Report by set: figures over all tasks and by environment, see `summarize_results`."""
        return {chosen.config.name: self._set_report(chosen) for chosen in self._sets}

    def _make_groups(self, chosen: EvalSet) -> list[GroupSpec]:
        specs = [
            GroupSpec(
                group_id=eval_group_id(self.eval_id, chosen.config.name, number),
                sequence_number=-1,
                task=task,
                purpose=Purpose.EVAL,
                size=chosen.config.attempts,
                temperature=chosen.config.temperature,
                eval_id=self.eval_id,
                exact_policy=self.policy,
            )
            for number, task in enumerate(chosen.tasks)
        ]
        self._set_of.update((spec.group_id, chosen.config.name) for spec in specs)
        return specs

    def _set_report(self, chosen: EvalSet) -> dict[str, Any]:
        name = chosen.config.name
        results = [r for i, r in self._results.items() if self._set_of[i] == name and r.attempts]
        every = chosen.config.reported_k
        return {
            **summarize_results(results, every),
            "missing": len(chosen.tasks) - len(results),
            "incomplete": sum(r.attempts < chosen.config.attempts for r in results),
            "by_env": {
                env: summarize_results([r for r in results if r.env_key == env], every)
                for env in chosen.by_env
            },
        }


def summarize_results(results: Sequence[TaskResult], every: Iterable[int]) -> dict[str, Any]:
    """Compute `tasks`, `ci95` of pass@1, and the figures that become metrics, all floats.

    - pass_at_{k} for each of `every` k, over the tasks with at least k graded attempts, and its
      95 % interval pass_at_{k}_low to _high, clustered by task, see `mean_interval`
    - avg_score: mean over tasks of the mean r
    - variance_per_prompt, signal_ratio: mean over tasks of the population variance of r, and the
      share of tasks whose attempts differ in r; of tasks with at least two graded attempts
    - mean_positive_reward: mean of the r > 0 of all attempts, or 0
    - avg_turns, avg_tool_calls: means over attempts; tool_error_rate: failed calls / calls

    Without tasks there is only the count."""
    if not results:
        return {"tasks": 0}
    report: dict[str, Any] = {"tasks": len(results)}
    for k in every:
        figures = [pass_at_k(r.attempts, r.passed, k) for r in results if r.attempts >= k]
        if figures:
            name, (low, high) = f"pass_at_{k}", mean_interval(figures)
            report |= {name: _mean(figures), f"{name}_low": low, f"{name}_high": high}
    report["ci95"] = [report["pass_at_1_low"], report["pass_at_1_high"]]
    report["avg_score"] = _mean([_mean(r.rewards) for r in results])
    if repeated := [r.rewards for r in results if r.attempts > 1]:
        report["variance_per_prompt"] = _mean([pvariance(rewards) for rewards in repeated])
        report["signal_ratio"] = _mean([has_signal(rewards) for rewards in repeated])
    positive = [reward for r in results for reward in r.rewards if reward > 0]
    report["mean_positive_reward"] = _mean(positive) if positive else 0.0
    attempts, calls = sum(r.attempts for r in results), sum(r.tool_calls for r in results)
    report["avg_turns"] = sum(r.turns for r in results) / attempts
    report["avg_tool_calls"] = calls / attempts
    report["tool_error_rate"] = sum(r.tool_errors for r in results) / max(1, calls)
    return report


def eval_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Name the figures of a report: `eval/all/...`, `eval/{env}/...`, `eval_{set}/...`."""
    metrics: dict[str, float] = {}
    for name, result in report.items():
        prefix = "eval" if name == MAIN_SET else f"eval_{name}"
        for count in ("missing", "incomplete"):
            metrics[f"{prefix}/all/{count}"] = float(result[count])
        for env, figures in {"all": result, **result["by_env"]}.items():
            own = f"{prefix}/{env.replace('/', '_')}"
            metrics |= {f"{own}/{k}": v for k, v in figures.items() if isinstance(v, float)}
    return metrics


def _task_result(group: ReadyGroup) -> TaskResult:
    counts = [record.trajectory.counts for record in group.graded]
    return TaskResult(
        group.spec.task.env_key,
        group.rewards,
        turns=sum(each.turns for each in counts),
        tool_calls=sum(each.tool_calls for each in counts),
        tool_errors=sum(sum(each.tool_errors.values()) for each in counts),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
