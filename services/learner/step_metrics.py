"""All metrics of one step together."""

from services.learner.batcher import Batch
from services.learner.dispatch import Dispatcher
from services.learner.metrics import (
    StepTimes,
    environment_metrics,
    failure_metrics,
    reward_metrics,
    staleness_metrics,
    throughput_metrics,
    timing_metrics,
)


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


def step_metrics(
    batch: Batch, version: int, times: StepTimes, dispatcher: Dispatcher
) -> dict[str, float]:
    counters = dispatcher.tally.take()
    groups = batch.all_groups
    return {
        **reward_metrics(groups),
        **environment_metrics(groups, counters.tries, counters.no_grade),
        **staleness_metrics(batch, version, dispatcher.tally),
        **failure_metrics(counters),
        **timing_metrics(times),
        **throughput_metrics(batch, counters, times),
    }
