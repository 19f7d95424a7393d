"""Logging of each step exactly once: to the trackers, the status and the journal."""

from collections.abc import Mapping

from flotilla_learner.groups.batcher import Batch
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.run.run_record import RunRecord
from flotilla_learner.tracking.histograms import step_histograms
from flotilla_learner.tracking.step_metrics import StepMetrics, step_facts, step_times
from flotilla_learner.tracking.tinker_metrics import tinker_metrics
from flotilla_learner.types import StepResult


class StepRecorder:
    """Records steps that train on groups of attempts."""

    def __init__(
        self, dispatcher: GroupDispatcher, record: RunRecord, *, tinker_names: bool
    ) -> None:
        """Create it; with `tinker_names` trackers get `tinker_metrics` too."""
        self._tally = dispatcher.tally
        self._record = record
        self._tinker_names = tinker_names
        self._metrics = StepMetrics(dispatcher)

    async def record_step(
        self,
        batch: Batch,
        result: StepResult,
        lap: tuple[dict[str, float], float],
        sync: float | None,
        *,
        base: int,
    ) -> None:
        """Record a finished step.

        `base` is the version at which the step started, `lap` the seconds of its stages and
        their total, `sync` the seconds from the previous announcement to the last engine's
        report."""
        tally, record, sinks = self._tally, self._record, self._record.sinks
        stages, whole = lap
        record.clock.note_step(whole)
        record.dumps.offer_step(base + 1, result)
        for group in batch.all_groups:
            tally.count_trained(group)
        counters = tally.take_counters()
        times = step_times(batch, stages, whole, sync)
        metrics = self._metrics.compute_metrics(batch, base, times, counters)
        metrics.update(_rank_metrics(result))
        metrics.update(record.checkpoint_metrics())
        metrics.update(record.teacher_metrics())
        metrics.update(record.judge_metrics())
        metrics.update(record.dumps.metrics())
        metrics.update(record.first_step_metrics)
        sinks.alarms.judge_step(step_facts(base + 1, batch, metrics, counters))
        metrics["alarms/raised"] = float(sinks.alarms.count)
        received = tally.received_in_all.total()
        metrics["throughput/trajectories"] = float(tally.received_before + received)
        metrics.update(record.launcher_metrics())
        histograms = {**step_histograms(batch.all_groups, base), **result.histograms}
        logged = metrics
        if self._tinker_names:
            epoch = metrics["sampling/epoch"]
            logged = metrics | tinker_metrics(batch.all_groups, times, epoch)
        sinks.tracker.log_metrics(base + 1, logged, histograms)
        left = record.seconds_left(base + 1, tally.first_received, received)
        sinks.status.update_metrics({**metrics, **left}, step=base + 1)
        await record.remember_step(base + 1)

    async def record_replayed(self, step: int, result: StepResult) -> None:
        """Record a step that was trained again. If it was never logged, it is logged now with the
        ranks' metrics alone, since the arrival of its groups is no longer known. Its dumps
        replace existing ones."""
        record = self._record
        record.dumps.offer_step(step, result)
        if step > record.logged_step:
            record.sinks.tracker.log_metrics(step, _rank_metrics(result), result.histograms)
            await record.remember_step(step)


def _rank_metrics(result: StepResult) -> dict[str, float]:
    metrics: Mapping[str, float] = result.metrics
    return {"policy/skipped": float(result.skipped), **metrics}
