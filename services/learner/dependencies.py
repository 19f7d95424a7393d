"""External dependencies of a learner."""

from collections.abc import Callable, Sequence
from pathlib import Path

from services.common.fingerprint import TokenizerDigests
from services.learner.alarms.ports import AlarmSink
from services.learner.dumps.run_dumps import Dumps
from services.learner.ports import Ranks, RemoteStore, SnapshotServer, Tracker
from services.learner.ranks.cluster import RayCluster
from services.learner.weights.live_sender import LiveSender


class LearnerDependencies:
    """Dependencies of a learner: ranks, trackers, WeightService, the tokenizer."""

    def __init__(
        self,
        ranks: Ranks,
        tracker: Tracker,
        tokenizer: TokenizerDigests | bytes,
        snapshots: SnapshotServer | None = None,
        weight_server: str | None = None,
        store: RemoteStore | None = None,
        alarm_sinks: Sequence[AlarmSink] = (),
        export: Callable[[Path, Path], None] | None = None,
        cluster: RayCluster | None = None,
        sender: LiveSender | None = None,
        dumps: Dumps | None = None,
    ) -> None:
        """Collect them. `export` writes the model of a checkpoint folder to another folder;
        `cluster` joins the learner's other machines and `sender` sends weights into live
        engines, if there are any. Without `dumps` the run writes none."""
        self.ranks = ranks
        self.tracker = tracker
        if isinstance(tokenizer, bytes):
            tokenizer = TokenizerDigests(tokenizer)
        self.tokenizer = tokenizer
        self.snapshots = snapshots
        self.weight_server = weight_server
        self.store = store
        self.alarm_sinks = alarm_sinks
        self.export = export
        self.cluster = cluster
        self.sender = sender
        self.dumps = dumps or Dumps()

    @property
    def publication_servers(self) -> Sequence[SnapshotServer]:
        """All servers that serve publications."""
        return [server for server in (self.snapshots, self.sender) if server is not None]
