"""Context of a run: everything that it is made of."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.watchdog import Watchdog
from services.learner.alarms.alarms import Alarms
from services.learner.checkpoints.checkpoint_folders import Checkpoints
from services.learner.checkpoints.uploads import CheckpointUploads
from services.learner.config.learner import LearnerConfig
from services.learner.groups.dispatcher import GroupDispatcher
from services.learner.guard.mismatch_guard import MismatchGuard
from services.learner.journal.store import Journal
from services.learner.ports import Ranks, SnapshotServer, TrackedRun, Tracker
from services.learner.run.clock import RunClock
from services.learner.run.eval_report import EvalSet
from services.learner.run.status import LearnerStatus
from services.learner.weights.weight_broadcast import WeightBroadcast


@dataclass(frozen=True, slots=True)
class RunContext:
    """Everything that a run is made of."""

    config: LearnerConfig
    seed: int
    run_dir: Path
    ranks: Ranks
    journal: Journal
    dispatcher: GroupDispatcher
    broadcast: WeightBroadcast
    guard: MismatchGuard
    # None when every worker shares memory with the learner.
    snapshots: SnapshotServer | None
    checkpoints: Checkpoints
    uploads: CheckpointUploads
    eval_sets: Sequence[EvalSet]
    tracker: Tracker
    tracked: TrackedRun
    alarms: Alarms
    status: LearnerStatus
    clock: RunClock
    watchdog: Watchdog
    drain: asyncio.Event
    # What the launcher tells of the run: its costs.
    launcher_metrics: Callable[[], Mapping[str, float]]
