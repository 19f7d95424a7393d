"""Dispatcher of groups: out as leases, back as trajectories. It keeps the lease book and the
journal in step.

The order is always the same. A lease: book, journal, reply. A trajectory: journal, book,
receipt. A crash between two of them leaves a lease that expires, or a trajectory that the next
start finds in the journal."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from uuid import uuid4

from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.group_types import GroupSpec, Lease
from flotilla_learner.groups.batcher import Batch, Batcher
from flotilla_learner.groups.counters import Tally
from flotilla_learner.groups.graded_attempts import (
    make_ended_group,
    make_record,
    why_verdict_is_void,
)
from flotilla_learner.groups.group_endings import GroupEndings
from flotilla_learner.groups.lease_idempotency import DrainingError, LeaseAnswers, LeaseRequest
from flotilla_learner.groups.leases import LeaseBook
from flotilla_learner.groups.policy_history import PolicyLineage
from flotilla_learner.groups.policy_provenance import Provenance
from flotilla_learner.groups.task_groups import FreshGroups
from flotilla_learner.groups.trajectory_intake import TrajectoryIntake
from flotilla_learner.groups.ungraded_tasks import UngradedTasks
from flotilla_learner.journal.curriculum_tables import CurriculumSnapshot
from flotilla_learner.journal.schema import StoredGroup
from flotilla_learner.journal.store import Journal
from flotilla_learner.sampling.refused_tasks import RefusalHistory

_log = get_logger(__name__)


class GroupDispatcher:
    """Leases groups, takes trajectories and passes complete groups on.

    TRAIN groups go to the batcher, the others to `endings.on_eval_group`. All methods run on
    one event loop; `changed` is notified after anything that a waiter may be waiting for."""

    def __init__(
        self,
        book: LeaseBook,
        batcher: Batcher,
        journal: Journal,
        lineage: PolicyLineage,
        fresh: FreshGroups,
        *,
        run_epoch: int,
        seed: int,
        max_requeues: int,
        opened: Iterable[str] = (),
    ) -> None:
        """Create it; `opened` are the environments in which the run has had an episode."""
        self.book = book
        self.batcher = batcher
        self.lineage = lineage
        self.run_epoch = run_epoch
        self.curriculum = fresh.curriculum
        self.tally = Tally()
        self.changed = asyncio.Condition()
        self.draining = False
        refusals = RefusalHistory(self.curriculum.task_counts, opened)
        self._giving_up = UngradedTasks(
            self.curriculum, refusals, self.tally, max_requeues=max_requeues
        )
        self.endings = GroupEndings(
            book, batcher, journal, fresh, self._giving_up, self.tally, self.changed
        )
        self._provenance = Provenance(lineage, book.workers, self.changed, run_epoch)
        self.intake = TrajectoryIntake(book, journal, self._provenance, self.endings)
        self._journal = journal
        self._fresh = fresh
        self._seed = seed
        self._lacking: frozenset[str] = frozenset()
        self._answers = LeaseAnswers(journal, fresh, run_epoch)

    # --- leases

    async def lease_group(self, request: LeaseRequest, poll_s: float) -> Lease | None:
        """Wait up to `poll_s` for a group; a repeated request gets the same lease again."""
        try:
            async with asyncio.timeout(poll_s), self.changed:
                while (lease_id := self._find_or_grant(request)) is None:
                    await self.changed.wait()
        except TimeoutError:
            return None
        await self._answers.wait_until_journaled(lease_id)
        return self.book.find_lease(lease_id)

    def attempt_seeds(self, lease: Lease) -> list[int]:
        """Return 63 bits per attempt that depend only on the run's seed and the try."""
        group = f"{self._seed}/{lease.group.group_id}"
        tries = [f"{group}/{index}/{number}".encode() for index, number in lease.attempts]
        return [int.from_bytes(hashlib.sha256(each).digest()[:8]) >> 1 for each in tries]

    async def release_leases(self, worker_id: str, lease_ids: Iterable[str]) -> None:
        self.book.release_leases(worker_id, lease_ids)
        await self.notify_changed()

    async def mark_serving(self, worker_id: str, policy: PolicyId) -> None:
        """Record that a worker's engine serves a policy, so that it may get work for it."""
        self.book.workers.mark_serving(worker_id, policy)
        await self.notify_changed()

    async def mark_not_serving(self, worker_id: str, refused: PolicyId) -> None:
        """Record that a worker's engine lacks the weights it claims: others do its work (I6)."""
        self.book.workers.mark_not_serving(worker_id, refused)
        self.book.end_leases_of(worker_id)
        await self.notify_changed()

    # --- groups

    async def expire_overdue(self) -> None:
        """Take back overdue leases and end overdue groups; call it regularly.
        Raises ConfigError if an environment of the run is unavailable.
        """
        await self.endings.settle_groups(self.book.expire_leases(loop_time()))
        if self._giving_up.problem:
            raise ConfigError(self._giving_up.problem)
        lacking = self.book.missing_capabilities(loop_time()) - self._lacking
        if lacking:
            self._lacking |= lacking
            _log.error(
                "tasks wait for a capability that no rollout worker has; add such a worker, or"
                " remove these tasks from the task file",
                capabilities=sorted(lacking),
            )

    async def advance_policy(self, policy: PolicyId, trained: Batch | None) -> None:
        """Adopt a new policy: free the slots of its step, and drop groups that are now stale."""
        self.lineage.add_policy(policy)
        self.book.policy = policy
        if trained:
            self.endings.forget_groups(group.spec.group_id for group in trained.all_groups)
        await self._drop_stale()

    async def wait_for_batch(self) -> Batch:
        """Wait for one step's groups."""
        while True:
            version = await self._drop_stale()
            async with self.changed:
                batch = self.batcher.take_batch(version)
                if batch is None:
                    await self.changed.wait()
                    continue
            if await self.endings.verify_batch(batch):
                return batch

    def learn_from_batch(self, step: int, batch: Batch) -> CurriculumSnapshot:
        """Update the curriculum with the outcomes of a step's groups.

        The caller journals the result with the step's plan and awaits nothing in between."""
        if batch.replaced and batch.places_without_signal:
            _log.warning(
                "a step trains on fewer groups with signal than groups_per_step, because"
                " max_refill times as many without signal were already replaced",
                step=step,
                replaced=batch.replaced,
                lacking=batch.places_without_signal,
            )
        change = self.curriculum.learn_from_outcomes(step, batch.outcomes)
        return CurriculumSnapshot(change, self._fresh.unjournaled)

    def mark_journaled(self, snapshot: CurriculumSnapshot) -> None:
        """Record that the result of `learn_from_batch` is on disk."""
        self._fresh.mark_journaled(snapshot.drawn)

    async def add_eval_groups(self, specs: Sequence[GroupSpec]) -> None:
        self.book.add_groups(specs)
        await self.notify_changed()

    async def drop_eval_groups(self, group_ids: Sequence[str], reason: str) -> None:
        await self.endings.settle_groups(self.book.drop_groups(group_ids, reason))

    async def restore_group(self, stored: StoredGroup) -> None:
        """Restore a group of an earlier epoch, with its trajectories and its lease."""
        spec = stored.spec
        if stored.damaged:
            await self._journal.quarantine_records(stored.damaged)
            return
        if not stored.leased:
            self.book.add_groups([spec])
            return
        self.book.restore_group(spec, loop_time())
        records = [
            make_record(t, dropped or self._provenance.why_unusable(spec, t.policies))
            for t, dropped in stored.trajectories
        ]
        if reason := why_verdict_is_void(records):
            for record in records:
                self.endings.records.add_record(record)
            await self.endings.settle_groups(self.book.drop_groups([spec.group_id], reason))
            return
        ended = [self.endings.take_record(spec, record) for record in records]
        if stored.lease:
            lease_id, worker_id, incarnation, request_id = stored.lease
            self.book.restore_lease(lease_id, spec.group_id, (worker_id, incarnation), loop_time())
            self._answers.remember_lease(worker_id, request_id, lease_id)
        await self.endings.settle_groups([e for e in ended if e])

    async def restore_replaced(self, stored: StoredGroup) -> None:
        """Count a group without signal in the next step, as before the restart."""
        if stored.damaged:
            await self._journal.quarantine_records(stored.damaged)
            return
        records = [make_record(trajectory, dropped) for trajectory, dropped in stored.trajectories]
        for record in records:
            self.endings.records.add_record(record)
        self.batcher.add_replaced(make_ended_group(stored.spec, records, loop_time()))

    async def stop_leasing(self) -> None:
        """Grant no more leases."""
        self.draining = True
        await self.notify_changed()

    async def notify_changed(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # --- inside

    def _find_or_grant(self, request: LeaseRequest) -> str | None:
        """Return the lease that a polling worker has got, or gets now if there is work for it."""
        worker = self.book.greet_worker(request.worker_id, request.incarnation, loop_time())
        if worker:
            worker.capabilities = request.capabilities
        if known := self._answers.find_lease_id(request):
            return known
        if self.draining:
            raise DrainingError("the learner is draining")
        if worker is None or request.holding is None:
            return None
        lease_id = uuid4().hex
        lease = self.book.lease_next(
            request.worker_id, request.free_attempts, lease_id, loop_time()
        )
        if lease is None:
            return None
        self.endings.records.note_lease(lease.group.group_id, loop_time())
        self._answers.answer_request(request, lease)
        return lease_id

    async def _drop_stale(self) -> int:
        """End groups that the next step may no longer train on; return the trainer's version."""
        version = self.book.policy.version if self.book.policy else 0
        if ended := self.endings.end_stale(version):
            await self.endings.settle_groups(ended)
        return version
