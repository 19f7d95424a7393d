"""What a run is made of."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.watchdog import Watchdog
from services.learner.alarms.alarms import Alarms
from services.learner.checkpoints.checkpoint_folders import Checkpoints
from services.learner.checkpoints.remote import NoUploads
from services.learner.config.learner import LearnerConfig
from services.learner.groups.dispatcher import Dispatcher
from services.learner.guard.guard import Guard
from services.learner.journal.store import Journal
from services.learner.ports import Ranks, Snapshots, TrackedRun, Tracker
from services.learner.run.clock import RunClock
from services.learner.run.eval_report import EvalSet
from services.learner.run.status import Status
from services.learner.weights.publisher import Broadcast


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    config: LearnerConfig
    seed: int
    run_dir: Path
    ranks: Ranks
    journal: Journal
    dispatcher: Dispatcher
    broadcast: Broadcast
    guard: Guard
    # None when every worker shares memory with the learner.
    snapshots: Snapshots | None
    checkpoints: Checkpoints
    uploads: NoUploads
    eval_sets: Sequence[EvalSet]
    tracker: Tracker
    tracked: TrackedRun
    alarms: Alarms
    status: Status
    clock: RunClock
    watchdog: Watchdog
    drain: asyncio.Event
    # What the launcher tells of the run: its costs.
    told: Callable[[], Mapping[str, float]]
