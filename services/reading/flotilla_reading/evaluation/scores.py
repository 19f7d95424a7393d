"""Scores of an evaluation, over all tasks and by environment. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from flotilla_common.domain.pass_rates import PASS_REWARD, pass_at_k, pass_power_k
from flotilla_common.domain.task_means import mean_interval
from flotilla_reading.evaluation.evaluated_attempts import EvaluatedAttempt, rewards_by_task

ALL = "all"


@dataclass(frozen=True, slots=True)
class Rate:
    """A mean over `tasks` that have the figure, with its 95 % interval."""

    mean: float
    low: float
    high: float
    tasks: int


@dataclass(frozen=True, slots=True)
class EnvironmentScore:
    """Scores in one environment, or in all. Attempts without a grade are counted, and are part of
    no mean. `pass_at_k` (one of k attempts passes) and `pass_power_k` (all k pass) are over the
    tasks with k graded attempts; None if there is none."""

    env_key: str
    tasks: int
    attempts: int
    graded: int
    ungraded: int
    k: int
    pass_at_1: Rate | None
    pass_at_k: Rate | None
    pass_power_k: Rate | None
    mean_reward: float | None


def score_evaluation(attempts: Sequence[EvaluatedAttempt], k: int) -> list[EnvironmentScore]:
    """Return the scores of each environment by name, then of all tasks."""
    by_env: defaultdict[str, list[EvaluatedAttempt]] = defaultdict(list)
    for each in attempts:
        by_env[each.env_key].append(each)
    named = [(env, by_env[env]) for env in sorted(by_env)]
    return [_score(env, found, k) for env, found in [*named, (ALL, attempts)]]


def _score(env: str, attempts: Sequence[EvaluatedAttempt], k: int) -> EnvironmentScore:
    rewards = rewards_by_task(attempts)
    graded = [each for each in rewards.values() if each]
    return EnvironmentScore(
        env_key=env,
        tasks=len(rewards),
        attempts=len(attempts),
        graded=sum(map(len, graded)),
        ungraded=sum(each.reward is None for each in attempts),
        k=k,
        pass_at_1=mean_rate(graded, pass_at_k, 1),
        pass_at_k=mean_rate(graded, pass_at_k, k),
        pass_power_k=mean_rate(graded, pass_power_k, k),
        mean_reward=fmean(map(fmean, graded)) if graded else None,
    )


def mean_rate(
    rewards: Iterable[Sequence[float]], estimate: Callable[[int, int, int], float], k: int
) -> Rate | None:
    """Return the mean of the tasks' estimates from n attempts and c passes; None without one."""
    found = [
        estimate(len(each), sum(reward >= PASS_REWARD for reward in each), k)
        for each in rewards
        if len(each) >= k
    ]
    return Rate(fmean(found), *mean_interval(found), len(found)) if found else None
