"""Logs each step once: to the trackers, the status and the journal."""

import uuid
from collections.abc import Mapping

from services.learner.groups.batcher import Batch
from services.learner.journal.store import Journal
from services.learner.ports import TrackedRun
from services.learner.run.context import Parts
from services.learner.tracking.histograms import step_histograms
from services.learner.tracking.step_metrics import StepMetrics, step_facts, step_times
from services.learner.types import StepResult

_META = "tracker"
ALARMS_META = "alarms"


async def tracked_run(journal: Journal) -> TrackedRun:
    """What earlier starts logged, and the id under which they did; a new run gets one here."""
    known = (await journal.meta()).get(_META)
    if known:
        return TrackedRun(known["id"], resumed=True, logged_step=known["step"])
    run = TrackedRun(uuid.uuid4().hex[:16])
    await journal.set_meta({_META: {"id": run.tracker_id, "step": 0}})
    return run


class Recorder:
    """Knows the newest step that was logged, over all starts of the run."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._metrics = StepMetrics(parts.dispatcher)
        self._logged_step = parts.tracked.logged_step

    async def step(
        self,
        batch: Batch,
        result: StepResult,
        lap: tuple[dict[str, float], float],
        sync: float | None,
        *,
        base: int,
    ) -> None:
        """`base` is the version that the step began with, `lap` the seconds of its stages and
        of all of it, `sync` those from the announcement before to the last engine's report."""
        parts = self._parts
        stages, whole = lap
        parts.clock.step_done(whole)
        for group in batch.all_groups:
            parts.dispatcher.tally.trained(group)
        counters = parts.dispatcher.tally.take()
        times = step_times(batch, stages, whole, sync)
        metrics = self._metrics.of(batch, base, times, counters)
        metrics.update(_of_ranks(result))
        metrics.update(parts.uploads.metrics())
        first = parts.clock.to_first_step
        metrics["timing/to_first_step"] = first if first is not None else 0.0
        parts.alarms.step_done(step_facts(base + 1, batch, metrics, counters))
        metrics["alarms/raised"] = float(parts.alarms.count)
        tally = parts.dispatcher.tally
        received = tally.received_before + tally.received_in_all.total()
        metrics["throughput/trajectories"] = float(received)
        metrics.update(parts.told())
        histograms = {**step_histograms(batch.all_groups, base), **result.histograms}
        parts.tracker.log(base + 1, metrics, histograms)
        parts.status.update(metrics, step=base + 1)
        await self._remember(base + 1)

    async def replayed(self, step: int, result: StepResult) -> None:
        """A step was trained again. One that was ended before it was logged is logged now, with
        what the ranks say alone: how its groups came in is not known any more."""
        if step > self._logged_step:
            self._parts.tracker.log(step, _of_ranks(result), result.histograms)
            await self._remember(step)

    async def _remember(self, step: int) -> None:
        """After the trackers: a kill in between has the step logged again, which those that keep
        files notice, and none is left out."""
        self._logged_step = step
        logged = {"id": self._parts.tracked.tracker_id, "step": step}
        seconds, alarms = self._parts.clock.seconds, self._parts.alarms.memory
        values = {"seconds": seconds, _META: logged, ALARMS_META: alarms}
        await self._parts.journal.set_meta(values)


def _of_ranks(result: StepResult) -> dict[str, float]:
    metrics: Mapping[str, float] = result.metrics
    return {"policy/skipped": float(result.skipped), **metrics}
