"""Groups on their way out as leases and back as trajectories: the lease book and the journal,
kept in step.

The order is always the same. A lease: book, journal, reply. A trajectory: journal, book,
receipt. A crash between two of them leaves a lease that expires, or a trajectory that the
next start finds in the journal.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from uuid import uuid4

from services.common.errors import ConfigError
from services.common.log import get_logger
from services.learner.groups.background import Writes
from services.learner.groups.batcher import Batch, Batcher, ReadyGroup, record_of
from services.learner.groups.completion import Endings
from services.learner.groups.counters import Tally
from services.learner.groups.leases import LeaseBook
from services.learner.groups.messages import DrainingError, LeaseRequest, Receipt, attempt_seed, now
from services.learner.groups.policy_history import Lineage
from services.learner.groups.provenance import Provenance
from services.learner.groups.requeue import GivingUp
from services.learner.groups.submissions import Intake
from services.learner.groups.task_groups import FreshGroups
from services.learner.groups.types import GroupSpec, Lease
from services.learner.journal.curriculum import Snapshot
from services.learner.journal.schema import StoredGroup
from services.learner.journal.store import Journal
from services.learner.sampling.refused_tasks import Refusals
from services.learner.trajectory import Trajectory
from services.learner.types import PolicyId

_log = get_logger(__name__)

_REMEMBERED_REQUESTS = 4096


class Dispatcher:
    """Leases groups, takes trajectories, and hands complete groups on.

    TRAIN groups go to the batcher; `endings.on_eval_group` gets the others. All methods run on
    one event loop; `changed` is notified after anything that a waiter may be waiting for.
    """

    def __init__(
        self,
        book: LeaseBook,
        batcher: Batcher,
        journal: Journal,
        lineage: Lineage,
        fresh: FreshGroups,
        *,
        run_epoch: int,
        seed: int,
        max_requeues: int,
        opened: Iterable[str] = (),
    ) -> None:
        """`opened` are the environments of which the run has had an episode."""
        self.book = book
        self.batcher = batcher
        self.lineage = lineage
        self.run_epoch = run_epoch
        self.curriculum = fresh.curriculum
        self.tally = Tally()
        self.changed = asyncio.Condition()
        self.draining = False
        refusals = Refusals(self.curriculum.sizes, opened)
        self._giving_up = GivingUp(self.curriculum, refusals, self.tally, max_requeues=max_requeues)
        self.endings = Endings(
            book, batcher, journal, fresh, self._giving_up, self.tally, self.changed
        )
        self._provenance = Provenance(lineage, book.workers, run_epoch)
        self.intake = Intake(book, journal, self._provenance, self.endings, self.changed)
        self._journal = journal
        self._fresh = fresh
        self._seed = seed
        self._lacking: frozenset[str] = frozenset()
        # Leases by (worker_id, request_id).
        self._answers: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._journaling: dict[str, asyncio.Task[None]] = {}
        self._writes = Writes()

    # --- leases

    async def lease(self, request: LeaseRequest, poll_s: float) -> Lease | None:
        """Wait up to `poll_s` for a group; a repeated request gets the lease it got before."""
        self._greet(request)
        asked = (request.worker_id, request.request_id)
        try:
            async with asyncio.timeout(poll_s), self.changed:
                while asked not in self._answers and not self._grant(request):
                    await self.changed.wait()
        except TimeoutError:
            return None
        lease_id = self._answers[asked]
        if writing := self._journaling.get(lease_id):
            await asyncio.shield(writing)
        return self.book.holder(lease_id)

    def seeds(self, lease: Lease) -> list[int]:
        """Of the lease's attempts: a function of the run's seed, the attempt and its try."""
        return [
            attempt_seed(self._seed, lease.group.group_id, *attempt) for attempt in lease.attempts
        ]

    async def release(self, worker_id: str, lease_ids: Iterable[str]) -> None:
        self.book.release(worker_id, lease_ids)
        await self.notify()

    async def serves(self, worker_id: str, policy: PolicyId) -> None:
        """A worker's engine serves a policy now: it may get work that it could not before."""
        self.book.workers.serves(worker_id, policy)
        await self.notify()

    async def serves_nothing(self, worker_id: str, refused: PolicyId) -> None:
        """A worker's engine has other weights than it says: others do its work (I6)."""
        self.book.workers.serves_nothing(worker_id, refused)
        self.book.end_leases_of(worker_id)
        await self.notify()

    # --- trajectories

    async def submit(self, trajectory: Trajectory) -> Receipt:
        """Take a finished try; when this returns it is durable.

        Raises LeaseLostError, ContentConflictError, UnknownPolicyError or ValueError.
        """
        return await self.intake.submit(trajectory)

    # --- groups

    async def expire(self) -> None:
        """Take back overdue leases and end overdue groups; call it now and then.

        Raises ConfigError when an environment of the run cannot be had.
        """
        await self.endings.settle(self.book.expire(now()))
        if self._giving_up.problem:
            raise ConfigError(self._giving_up.problem)
        lacking = self.book.missing_capabilities(now()) - self._lacking
        if lacking:
            self._lacking |= lacking
            _log.error(
                "tasks wait for a capability that no rollout worker has; add such a worker, or"
                " take these tasks out of the task file",
                capabilities=sorted(lacking),
            )

    async def published(self, policy: PolicyId, trained: Batch | None) -> None:
        """A new policy is out: free the slots of its step, and drop what is now too old."""
        self.lineage.add(policy)
        self.book.policy = policy
        if trained:
            self.endings.forget(group.spec.group_id for group in trained.all_groups)
        await self._drop_stale()

    async def take_batch(self) -> Batch:
        """Wait for one step's groups."""
        while True:
            version = await self._drop_stale()
            async with self.changed:
                batch = self.batcher.take(version)
                if batch is None:
                    await self.changed.wait()
                    continue
            if await self.endings.intact(batch):
                return batch

    def learn(self, step: int, batch: Batch) -> Snapshot:
        """What the groups of a step teach the curriculum, to be journaled with its plan: await
        nothing in between."""
        if batch.replaced and batch.lacking:
            _log.warning(
                "a step trains on fewer groups with signal than groups_per_step, because"
                " max_refill times as many without were replaced already",
                step=step,
                replaced=batch.replaced,
                lacking=batch.lacking,
            )
        change = self.curriculum.learn(step, batch.outcomes)
        return Snapshot(change, self._fresh.unjournaled)

    def journaled(self, snapshot: Snapshot) -> None:
        """What `learn` returned is on the disk."""
        self._fresh.journaled(snapshot.drawn)

    async def add_eval(self, specs: Sequence[GroupSpec]) -> None:
        self.book.add(specs)
        await self.notify()

    async def drop_eval(self, group_ids: Sequence[str], reason: str) -> None:
        await self.endings.settle(self.book.drop(group_ids, reason))

    async def restore(self, stored: StoredGroup) -> None:
        """Take up a group of an earlier epoch, its trajectories and its lease."""
        spec = stored.spec
        if stored.damaged:
            await self._journal.quarantine(stored.damaged)
            return
        if not stored.leased:
            self.book.add([spec])
            return
        self.book.restore(spec, now())
        ended = [
            self.endings.take(
                spec, record_of(t, dropped or self._provenance.unusable(spec, t.policies))
            )
            for t, dropped in stored.trajectories
        ]
        if stored.lease:
            lease_id, worker_id, incarnation, request_id = stored.lease
            self.book.restore_lease(lease_id, spec.group_id, (worker_id, incarnation), now())
            self._remember((worker_id, request_id), lease_id)
        await self.endings.settle([e for e in ended if e])

    async def restore_replaced(self, stored: StoredGroup) -> None:
        """Count a group without signal with the next step, as it would have been before."""
        if stored.damaged:
            await self._journal.quarantine(stored.damaged)
            return
        records = [record_of(trajectory, dropped) for trajectory, dropped in stored.trajectories]
        for record in records:
            self.endings.records.add(record)
        graded = tuple(r for r in records if r.trajectory.reward is not None and not r.dropped)
        failed = tuple(r for r in records if r not in graded)
        self.batcher.add_replaced(ReadyGroup(stored.spec, graded, failed, now(), now()))

    async def drain(self) -> None:
        """Give out no more work."""
        self.draining = True
        await self.notify()

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # --- inside

    def _greet(self, request: LeaseRequest) -> None:
        self.book.greet(request.worker_id, request.incarnation, now())
        worker = self.book.workers.get(request.worker_id)
        if worker and worker.incarnation == request.incarnation:
            worker.capabilities = request.capabilities

    def _grant(self, request: LeaseRequest) -> bool:
        """Lease something to a polling worker, if there is something for it."""
        if self.draining:
            raise DrainingError("the learner is draining")
        worker = self.book.workers.get(request.worker_id)
        if worker is None:
            self._greet(request)
        elif worker.incarnation != request.incarnation:
            return False
        if request.holding is None:
            return False
        lease_id = uuid4().hex
        lease = self.book.lease(request.worker_id, request.free_attempts, lease_id, now())
        if lease is None:
            return False
        self._remember((request.worker_id, request.request_id), lease_id)
        self.endings.records.leased(lease.group.group_id, now())
        task = self._journaling[lease_id] = self._writes.start(self._journal_lease(lease, request))
        task.add_done_callback(lambda _: self._journaling.pop(lease_id))
        return True

    async def _journal_lease(self, lease: Lease, request: LeaseRequest) -> None:
        """With whatever was drawn before it."""
        drawn = self._fresh.unjournaled
        await self._journal.leased(
            lease, request.incarnation, request.request_id, self.run_epoch, drawn
        )
        self._fresh.journaled(drawn)

    def _remember(self, asked: tuple[str, str], lease_id: str) -> None:
        self._answers[asked] = lease_id
        while len(self._answers) > _REMEMBERED_REQUESTS:
            self._answers.popitem(last=False)

    async def _drop_stale(self) -> int:
        """End what the next step may no longer train on; returns the trainer's version."""
        version = self.book.policy.version if self.book.policy else 0
        if ended := self.endings.stale(version):
            await self.endings.settle(ended)
        return version
