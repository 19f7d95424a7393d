"""Logging of each step exactly once: to the trackers, the status and the journal."""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from services.learner.dumps.run_dumps import Dumps
from services.learner.groups.batcher import Batch
from services.learner.groups.dispatcher import GroupDispatcher
from services.learner.journal.schema import RUN_ID
from services.learner.journal.store import Journal
from services.learner.ports import TrackedRun
from services.learner.run.remaining_time import RemainingTime
from services.learner.run.result_sinks import ResultSinks
from services.learner.run.run_clock import RunClock
from services.learner.tracking.histograms import step_histograms
from services.learner.tracking.step_metrics import StepMetrics, step_facts, step_times
from services.learner.tracking.tinker_metrics import tinker_metrics
from services.learner.types import StepResult

# Reported to the launcher only; 0 while it is unknown, which replaces an earlier start's.
SECONDS_LEFT = "timing/seconds_left"
_META = "tracker"
_ALARMS_META = "alarms"


async def load_tracked_run(journal: Journal) -> TrackedRun:
    """Load the tracker id and the last step that earlier starts logged; assign a new run its
    id."""
    meta = await journal.read_meta()
    known, run_id = meta.get(_META), meta[RUN_ID]
    if known:
        return TrackedRun(known["id"], resumed=True, logged_step=known["step"], run_id=run_id)
    run = TrackedRun(uuid.uuid4().hex[:16], run_id=run_id)
    await journal.set_meta({_META: {"id": run.tracker_id, "step": 0}})
    return run


async def load_alarm_memory(journal: Journal) -> dict[str, Any]:
    """Load the alarms' state as stored with the newest recorded step."""
    return (await journal.read_meta()).get(_ALARMS_META, {})


class StepRecorder:
    """Records steps, and knows the newest logged one over all starts of the run."""

    def __init__(
        self,
        dispatcher: GroupDispatcher,
        journal: Journal,
        sinks: ResultSinks,
        clock: RunClock,
        tracked: TrackedRun,
        dumps: Dumps,
        remaining: RemainingTime,
        *,
        checkpoint_metrics: Callable[[], Mapping[str, float]],
        launcher_metrics: Callable[[], Mapping[str, float]],
        tinker_names: bool,
    ) -> None:
        """Create it; `launcher_metrics` are the run's costs, as the launcher reports them. With
        `tinker_names` trackers get `tinker_metrics` too."""
        self._tally = dispatcher.tally
        self._journal = journal
        self._sinks = sinks
        self._clock = clock
        self._tracker_id = tracked.tracker_id
        self._logged_step = tracked.logged_step
        self._dumps = dumps
        self._remaining = remaining
        self._checkpoint_metrics = checkpoint_metrics
        self._launcher_metrics = launcher_metrics
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
        tally, sinks = self._tally, self._sinks
        stages, whole = lap
        self._clock.note_step(whole)
        self._dumps.offer_step(base + 1, result)
        for group in batch.all_groups:
            tally.count_trained(group)
        counters = tally.take_counters()
        times = step_times(batch, stages, whole, sync)
        metrics = self._metrics.compute_metrics(batch, base, times, counters)
        metrics.update(_rank_metrics(result))
        metrics.update(self._checkpoint_metrics())
        metrics.update(self._dumps.metrics())
        first = self._clock.to_first_step
        metrics["timing/to_first_step"] = first if first is not None else 0.0
        sinks.alarms.judge_step(step_facts(base + 1, batch, metrics, counters))
        metrics["alarms/raised"] = float(sinks.alarms.count)
        received = tally.received_before + tally.received_in_all.total()
        metrics["throughput/trajectories"] = float(received)
        metrics.update(self._launcher_metrics())
        histograms = {**step_histograms(batch.all_groups, base), **result.histograms}
        logged = metrics
        if self._tinker_names:
            epoch = metrics["sampling/epoch"]
            logged = metrics | tinker_metrics(batch.all_groups, times, epoch)
        sinks.tracker.log_metrics(base + 1, logged, histograms)
        sinks.status.update_metrics({**metrics, **self._seconds_left(base + 1)}, step=base + 1)
        await self._remember_step(base + 1)

    def _seconds_left(self, step: int) -> dict[str, float]:
        """Return the remaining time for people; it is no metric of a step."""
        tally = self._tally
        received = tally.received_in_all.total()
        left = self._remaining.end_step(step, time.monotonic(), tally.first_received, received)
        return {SECONDS_LEFT: left or 0.0}

    async def record_replayed(self, step: int, result: StepResult) -> None:
        """Record a step that was trained again. If it was never logged, it is logged now with the
        ranks' metrics alone, since the arrival of its groups is no longer known. Its dumps
        replace existing ones."""
        self._dumps.offer_step(step, result)
        if step > self._logged_step:
            self._sinks.tracker.log_metrics(step, _rank_metrics(result), result.histograms)
            await self._remember_step(step)

    async def _remember_step(self, step: int) -> None:
        """Store the logged step, after the trackers: a kill in between causes the step to be logged
        again, which trackers with files detect, and none is lost."""
        self._logged_step = step
        logged = {"id": self._tracker_id, "step": step}
        seconds, alarms = self._clock.seconds, self._sinks.alarms.memory
        values = {"seconds": seconds, _META: logged, _ALARMS_META: alarms}
        await self._journal.set_meta(values)


def _rank_metrics(result: StepResult) -> dict[str, float]:
    metrics: Mapping[str, float] = result.metrics
    return {"policy/skipped": float(result.skipped), **metrics}
