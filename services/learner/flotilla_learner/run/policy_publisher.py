"""Announcement of a step's weights to the rollout workers, and its effect on leases."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_common.domain.policy import PolicyId
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.groups.batcher import Batch
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.guard.mismatch_guard import MismatchGuard
from flotilla_learner.journal.store import Journal
from flotilla_learner.ports import SnapshotServer
from flotilla_learner.types import Publication
from flotilla_learner.weights.weight_broadcast import Announcement, WeightBroadcast

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyPublisher:
    """Publishes policies, each durable in the journal before any worker learns of it."""

    config: LearnerConfig
    dispatcher: GroupDispatcher
    broadcast: WeightBroadcast
    guard: MismatchGuard
    journal: Journal
    # Empty if every worker shares memory with the learner.
    servers: Sequence[SnapshotServer]

    @property
    def sync_seconds(self) -> float | None:
        """Seconds from the newest announcement to the last engine's report."""
        return self.broadcast.sync_seconds

    async def publish_policy(
        self, publication: Publication, trained: Batch | None, *, train: bool
    ) -> PolicyId:
        """Announce written weights, and free the slots of the step that made them.

        Without `train`, only evaluations are leased."""
        version, lineage = publication.version, self.dispatcher.lineage
        policy = PolicyId(self.dispatcher.run_epoch, version, publication.fingerprint)
        known = lineage.fingerprints_of(version)
        if known and publication.fingerprint not in known:
            _log.warning("replay produced other weights than the first time", version=version)
        await self.journal.add_publication(policy)
        for server in self.servers:
            await server.serve_publication(publication, policy)
        train = train and self.config.mode == "train"
        self.dispatcher.book.train_slots = self._slots_left(version) if train else 0
        probes = self.guard.probes_for(publication)
        self.broadcast.announce_policy(Announcement(policy, publication, probes))
        await self.dispatcher.advance_policy(policy, trained)
        asyncio.get_running_loop().call_later(
            self.config.publish_timeout_s, self._end_absent_leases, policy
        )
        return policy

    def _slots_left(self, version: int) -> int:
        """Return the slots for TRAIN groups: fewer if the run needs fewer."""
        remaining = (self.config.total_steps - version) * self.config.groups_per_step
        return min(self.dispatcher.book.rules.train_slots, remaining)

    def _end_absent_leases(self, policy: PolicyId) -> None:
        for worker_id in self.broadcast.list_absent(policy):
            _log.warning(
                "worker did not load the policy in time", worker=worker_id, version=policy.version
            )
            self.dispatcher.book.end_leases_of(worker_id)
