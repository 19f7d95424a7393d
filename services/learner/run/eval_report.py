"""Evaluation: fixed tasks, sampled from exactly one policy, never trained on."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.common.domain.attempts import Purpose
from services.common.domain.pass_rates import PASS_REWARD, pass_at_k
from services.common.domain.policy import PolicyId
from services.learner.config.learner import EvalMoment, EvalSetConfig
from services.learner.group_types import GroupSpec
from services.learner.groups.batcher import ReadyGroup
from services.learner.sampling.tasks import Task

# The 97.5 % quantile of the normal distribution.
_Z = 1.959963984540054
# Set whose results are the run's own: `eval/...` without a suffix.
MAIN_SET = "heldout"


# `eval_only` is the evaluation of all sets in mode `eval`.
Moment = EvalMoment | Literal["eval_only"]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A configured set with its tasks loaded."""

    config: EvalSetConfig
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Attempts at one task: how many were graded, how many passed, their mean reward."""

    env_key: str
    attempts: int
    passed: int
    mean_reward: float


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

    def build_report(self) -> dict[str, Any]:
        """Report by set: figures over all tasks and by environment, see `summarize_results`."""
        return {chosen.config.name: self._set_report(chosen) for chosen in self._sets}

    def _make_groups(self, chosen: EvalSet) -> list[GroupSpec]:
        specs = [
            GroupSpec(
                group_id=f"{self.eval_id}-{chosen.config.name}-{number:05d}",
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
        envs = sorted({task.env_key for task in chosen.tasks})
        missing = len(chosen.tasks) - len(results)
        return {
            **summarize_results(results),
            "missing": missing,
            "by_env": {
                env: summarize_results([r for r in results if r.env_key == env]) for env in envs
            },
        }


def summarize_results(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Compute `pass_at_k` for each k for which all tasks have enough attempts, `ci95`,
    `avg_score` and `tasks`.

    `ci95` belongs to pass@1: the Wilson score interval with the number of tasks as n, exact in kind
    for one attempt a task and conservative for more; the same holds for the intervals of other k
    among the metrics. Figures are fractions; without tasks there is only the count."""
    if not results:
        return {"tasks": 0}
    report: dict[str, Any] = {"tasks": len(results)}
    for k in _powers_of_two(min(r.attempts for r in results)):
        report[f"pass_at_{k}"] = _mean([pass_at_k(r.attempts, r.passed, k) for r in results])
    report["ci95"] = list(wilson_interval(report["pass_at_1"], len(results)))
    report["avg_score"] = _mean([r.mean_reward for r in results])
    return report


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction of `count` (Wilson 1927)."""
    square = _Z * _Z / count
    centre = (fraction + square / 2) / (1 + square)
    variance = fraction * (1 - fraction) / count + square / (4 * count)
    half = _Z * math.sqrt(variance) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def eval_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Name the figures of a report: `eval/all/...`, `eval/{env}/...`, `eval_{set}/...`."""
    metrics: dict[str, float] = {}
    for name, result in report.items():
        prefix = "eval" if name == MAIN_SET else f"eval_{name}"
        metrics.update(_flatten_metrics(f"{prefix}/all", result))
        metrics[f"{prefix}/all/missing"] = float(result["missing"])
        for env, by_env in result["by_env"].items():
            metrics.update(_flatten_metrics(f"{prefix}/{env.replace('/', '_')}", by_env))
    return metrics


def _flatten_metrics(prefix: str, result: Mapping[str, Any]) -> dict[str, float]:
    if "pass_at_1" not in result:
        return {}
    flat = {f"{prefix}/{k}": v for k, v in result.items() if k.startswith(("pass_at_", "avg_"))}
    for name in [name for name in result if name.startswith("pass_at_")]:
        low, high = wilson_interval(result[name], result["tasks"])
        flat |= {f"{prefix}/{name}_low": low, f"{prefix}/{name}_high": high}
    return flat


def _task_result(group: ReadyGroup) -> TaskResult:
    rewards = group.rewards
    passed = sum(1 for reward in rewards if reward >= PASS_REWARD)
    mean = _mean(rewards) if rewards else 0.0
    return TaskResult(group.spec.task.env_key, len(rewards), passed, mean)


def _powers_of_two(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length()) if 2**n <= limit]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
