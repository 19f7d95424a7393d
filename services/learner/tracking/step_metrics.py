"""Collection of all metrics of one step."""

from collections.abc import Mapping

from services.common.domain.trajectory import Trajectory
from services.learner.alarms.attempt_behavior import sum_attempts
from services.learner.alarms.types import StepFacts
from services.learner.groups.batcher import Batch
from services.learner.groups.counters import StepCounters
from services.learner.groups.dispatcher import GroupDispatcher
from services.learner.groups.staleness import STALE
from services.learner.tracking.metric_formulas import (
    StepTimes,
    cost_metrics,
    environment_metrics,
    failure_metrics,
    reward_metrics,
    staleness_metrics,
    timing_metrics,
    train_throughput,
)
from services.learner.tracking.sampling_metrics import sampling_metrics
from services.learner.tracking.throughput import ThroughputWindow


def step_times(
    batch: Batch, stages: dict[str, float], whole: float, sync: float | None
) -> StepTimes:
    groups = batch.all_groups
    rollout = max(g.ended_at for g in groups) - min(g.leased_at for g in groups)
    return StepTimes(
        rollout_wait=stages.get("rollout_wait", 0.0),
        rollout=rollout,
        train=stages.get("train", 0.0),
        publish=stages.get("publish", 0.0),
        sync=sync,
        eval_wait=stages.get("eval_wait", 0.0),
        checkpoint=stages.get("checkpoint", 0.0),
        step=whole,
    )


def step_facts(
    step: int, batch: Batch, metrics: Mapping[str, float], counters: StepCounters
) -> StepFacts:
    """Return the facts about a step that the alarms judge."""
    signal: dict[str, tuple[int, int]] = {}
    tokens: dict[str, list[int]] = {}
    attempts: dict[str, list[Trajectory]] = {}
    for group in batch.all_groups:
        env = group.spec.task.env_key
        some, whole = signal.get(env, (0, 0))
        signal[env] = (some + group.has_signal, whole + 1)
        tokens.setdefault(env, []).extend(record.policy_tokens for record in group.graded)
        attempts.setdefault(env, []).extend(record.trajectory for record in group.graded)
    stale = counters.dropped_groups[STALE]
    envs = signal.keys() | counters.given_up.keys() | counters.refused.keys()
    return StepFacts(
        step=step,
        metrics=metrics,
        signal=signal,
        no_grade={env: (counters.no_grade[env], tries) for env, tries in counters.tries.items()},
        stale=(stale, stale + len(batch.all_groups)),
        lengths={env: sum(found) / len(found) for env, found in tokens.items() if found},
        given_up={env: counters.given_up[env] for env in sorted(envs)},
        refused={env: counters.refused[env] for env in sorted(envs)},
        refused_words=dict(counters.refused_words),
        no_grade_words=dict(counters.no_grade_words),
        conduct={env: sum_attempts(found) for env, found in attempts.items()},
    )


class StepMetrics:
    """Computes metrics, including those over several steps."""

    def __init__(self, dispatcher: GroupDispatcher) -> None:
        self._dispatcher = dispatcher
        self._pace = ThroughputWindow()

    def compute_metrics(
        self, batch: Batch, version: int, times: StepTimes, counters: StepCounters
    ) -> dict[str, float]:
        """Compute all metrics of the step that `batch` made out of `version`; `counters` cover
        everything since the previous step."""
        tally = self._dispatcher.tally
        groups = batch.all_groups
        return {
            **reward_metrics(groups),
            **environment_metrics(groups, counters.tries, counters.no_grade),
            **staleness_metrics(batch, version, tally),
            **failure_metrics(counters),
            **cost_metrics(batch, counters),
            **timing_metrics(times),
            **train_throughput(batch, times),
            **self._pace.add_step(times, counters),
            **sampling_metrics(self._dispatcher.curriculum, version + 1, batch),
        }
