"""External dependencies of a learner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.alarms.ports import AlarmSink
from flotilla_learner.dumps.run_dumps import Dumps
from flotilla_learner.judge.group_judge import GroupJudge
from flotilla_learner.ports import (
    HintRenderer,
    Ranks,
    RemoteStore,
    SnapshotServer,
    Teacher,
    Tracker,
)
from flotilla_learner.ranks.cluster import RayCluster
from flotilla_learner.weights.live_sender import LiveSender


@dataclass(frozen=True, slots=True)
class LearnerDependencies:
    """Dependencies of a learner: ranks, trackers, WeightService, the tokenizer."""

    ranks: Ranks
    tracker: Tracker
    tokenizer: TokenizerDigests
    snapshots: SnapshotServer | None = None
    weight_server: str | None = None
    store: RemoteStore | None = None
    alarm_sinks: Sequence[AlarmSink] = ()
    # Writes the model of a checkpoint folder to another folder.
    export: Callable[[Path, Path], None] | None = None
    # Joins the learner's other machines, if there are any.
    cluster: RayCluster | None = None
    # Sends weights into live engines, if there are any.
    sender: LiveSender | None = None
    # By default the run writes none.
    dumps: Dumps = field(default_factory=Dumps)
    # How the policy reads pictures; None if it is shown none.
    vision: VisionFamily | None = None
    # Scores the policy's samples, if the run has one.
    teacher: Teacher | None = None
    # Renders what only that teacher is told, if it is told anything.
    hints: HintRenderer | None = None
    # Compares the attempts of groups, if the run has one.
    judge: GroupJudge | None = None

    @property
    def publication_servers(self) -> Sequence[SnapshotServer]:
        return [server for server in (self.snapshots, self.sender) if server is not None]
