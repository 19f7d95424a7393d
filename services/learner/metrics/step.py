"""All metrics of one step together."""

from services.learner.groups.batcher import Batch
from services.learner.groups.dispatcher import Dispatcher
from services.learner.metrics.formulas import (
    StepTimes,
    environment_metrics,
    failure_metrics,
    reward_metrics,
    staleness_metrics,
    timing_metrics,
    train_throughput,
)
from services.learner.metrics.pace import Pace
from services.learner.sampling.figures import sampling_metrics


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


class StepMetrics:
    """Knows the steps before, for the metrics of several."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._pace = Pace()

    def of(self, batch: Batch, version: int, times: StepTimes) -> dict[str, float]:
        """All metrics of the step that `batch` made out of `version`."""
        tally = self._dispatcher.tally
        counters = tally.take()
        groups = batch.all_groups
        return {
            **reward_metrics(groups),
            **environment_metrics(groups, counters.tries, counters.no_grade),
            **staleness_metrics(batch, version, tally),
            **failure_metrics(counters),
            **timing_metrics(times),
            **train_throughput(batch, times),
            **self._pace.after(times, counters),
            **sampling_metrics(self._dispatcher.curriculum, version + 1, batch),
        }
