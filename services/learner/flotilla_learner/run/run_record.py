"""What the steps of a run are recorded with, and the newest logged one over all starts."""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flotilla_learner.dumps.run_dumps import Dumps
from flotilla_learner.journal.schema import RUN_ID
from flotilla_learner.journal.store import Journal
from flotilla_learner.ports import TrackedRun
from flotilla_learner.run.remaining_time import RemainingTime
from flotilla_learner.run.result_sinks import ResultSinks
from flotilla_learner.run.run_clock import RunClock

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


@dataclass(kw_only=True)
class RunRecord:
    """Shared by what records a run's steps. `launcher_metrics` are the run's costs, as the launcher
    reports them."""

    journal: Journal
    sinks: ResultSinks
    clock: RunClock
    dumps: Dumps
    remaining: RemainingTime
    checkpoint_metrics: Callable[[], Mapping[str, float]]
    launcher_metrics: Callable[[], Mapping[str, float]]
    tracked: TrackedRun
    teacher_metrics: Callable[[], Mapping[str, float]] = dict
    judge_metrics: Callable[[], Mapping[str, float]] = dict

    def __post_init__(self) -> None:
        self.logged_step = self.tracked.logged_step

    def seconds_left(self, step: int, first: float | None, received: int) -> dict[str, float]:
        """Return the remaining time for people; it is no metric of a step. See `RemainingTime`."""
        left = self.remaining.end_step(step, time.monotonic(), first, received)
        return {SECONDS_LEFT: left or 0.0}

    @property
    def first_step_metrics(self) -> dict[str, float]:
        """Seconds to the end of the run's first step."""
        first = self.clock.to_first_step
        return {"timing/to_first_step": first if first is not None else 0.0}

    async def remember_step(self, step: int) -> None:
        """Store the logged step, after the trackers: a kill in between causes the step to be logged
        again, which trackers with files detect, and none is lost."""
        self.logged_step = step
        logged = {"id": self.tracked.tracker_id, "step": step}
        seconds, alarms = self.clock.seconds, self.sinks.alarms.memory
        values = {"seconds": seconds, _META: logged, _ALARMS_META: alarms}
        await self.journal.set_meta(values)
