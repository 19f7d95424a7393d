"""Groups on their way out as leases and back as trajectories: the lease book and the journal,
kept in step.

The order is always the same. A lease: book, journal, reply. A trajectory: journal, book,
receipt. A crash between two of them leaves a lease that expires, or a trajectory that the
next start finds in the journal.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from services.common.log import get_logger
from services.learner import trajectory as trajectories
from services.learner.groups.batcher import Batch, Batcher, ReadyGroup, Record, record_of
from services.learner.groups.leases import LeaseBook
from services.learner.groups.lineage import Lineage
from services.learner.groups.provenance import Provenance
from services.learner.groups.records import Records
from services.learner.groups.requests import (
    DrainingError,
    LeaseRequest,
    Receipt,
    attempt_seed,
    check_temperature,
    now,
)
from services.learner.groups.types import Ended, GroupSpec, Lease, LeaseLostError, Purpose
from services.learner.journal.attempts import ContentConflictError
from services.learner.journal.schema import StoredGroup
from services.learner.journal.store import Journal
from services.learner.metrics.tally import Tally
from services.learner.trajectory import Trajectory
from services.learner.types import PolicyId

_log = get_logger(__name__)
T = TypeVar("T")

_REMEMBERED_REQUESTS = 4096


class Dispatcher:
    """Leases groups, takes trajectories, and hands complete groups on.

    TRAIN groups go to the batcher; `on_eval_group` gets the others. All methods run on one
    event loop; `changed` is notified after anything that a waiter may be waiting for.
    """

    # How long a trajectory waits for the report on a policy that wrote some of it.
    report_grace_s = 5.0

    def __init__(
        self,
        book: LeaseBook,
        batcher: Batcher,
        journal: Journal,
        lineage: Lineage,
        *,
        run_epoch: int,
        seed: int,
        max_requeues: int,
    ) -> None:
        self.book = book
        self.batcher = batcher
        self.lineage = lineage
        self.run_epoch = run_epoch
        self.tally = Tally()
        self.changed = asyncio.Condition()
        self.draining = False
        self.on_eval_group: Callable[[ReadyGroup], None] = _ignore
        self._provenance = Provenance(lineage, book.workers, run_epoch)
        self._journal = journal
        self._seed = seed
        self._max_requeues = max_requeues
        self._lacking: frozenset[str] = frozenset()
        self._records = Records()
        # Leases by (worker_id, request_id).
        self._answers: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._journaling: dict[str, asyncio.Task[None]] = {}
        self._writes: set[asyncio.Task[Any]] = set()

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
        try:
            spec = self.book.check(trajectory.lease_id, trajectory.key, now())
        except LeaseLostError:
            known = await self._journal.record_digest(trajectory.key)
            if known is None:
                raise
            if known != trajectories.record_digest(trajectory):
                raise ContentConflictError(
                    f"other content is journaled under {trajectory.key}"
                ) from None
            return Receipt(repeated=True, group_complete=True)
        check_temperature(spec, trajectory)
        self._provenance.check_published(trajectory.policies)
        holder = self.book.holder(trajectory.lease_id)
        served = holder and await self._served(holder.worker_id, trajectory.policies)
        dropped = "" if served else "unverified_policy"
        return await self._finish(self._store(spec, trajectory, dropped))

    async def _served(self, worker_id: str, policies: Sequence[PolicyId]) -> bool:
        """Whether a worker has shown, or shows in a moment, that it serves these policies: an
        engine samples from new weights before its report arrives."""
        try:
            async with asyncio.timeout(self.report_grace_s), self.changed:
                await self.changed.wait_for(lambda: self._provenance.shown(worker_id, policies))
        except TimeoutError:
            return False
        return True

    async def _store(self, spec: GroupSpec, trajectory: Trajectory, dropped: str) -> Receipt:
        why = dropped or self._provenance.unusable(spec, trajectory.policies)
        record = record_of(trajectory, why)
        new = await self._journal.receive(trajectory, record.dropped)
        if new and not self.book.waits_for(trajectory.key):
            # Its group or its attempt came to its end while this was written.
            await self._journal.drop_late(trajectory.key)
        elif new and (ended := self._take(spec, record)):
            await self._settle([ended])
        complete = self.book.holder(trajectory.lease_id) is None
        return Receipt(repeated=not new, group_complete=complete)

    def _take(self, spec: GroupSpec, record: Record) -> Ended | None:
        key = record.trajectory.key
        self._records.add(record)
        self.tally.received(record, spec)
        graded = record.trajectory.reward is not None and not record.dropped
        return self.book.record(key, graded=graded, oldest_version=record.oldest_version)

    # --- groups

    async def expire(self) -> None:
        """Take back overdue leases and end overdue groups; call it now and then."""
        await self._settle(self.book.expire(now()))
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
            self._forget(group.spec.group_id for group in trained.all_groups)
        await self._drop_stale()

    async def take_batch(self) -> Batch:
        """Wait for one step's groups."""
        while True:
            version = await self._drop_stale()
            async with self.changed:
                if batch := self.batcher.take(version):
                    return batch
                await self.changed.wait()

    async def add_eval(self, specs: Sequence[GroupSpec]) -> None:
        self.book.add(specs)
        await self.notify()

    async def drop_eval(self, group_ids: Sequence[str], reason: str) -> None:
        await self._settle(self.book.drop(group_ids, reason))

    async def restore(self, stored: StoredGroup) -> None:
        """Take up a group of an earlier epoch, its trajectories and its lease."""
        spec = stored.spec
        if not stored.leased:
            self.book.add([spec])
            return
        self.book.restore(spec, now())
        ended = [
            self._take(spec, record_of(t, dropped or self._provenance.unusable(spec, t.policies)))
            for t, dropped in stored.trajectories
        ]
        if stored.lease:
            lease_id, worker_id, incarnation, request_id = stored.lease
            self.book.restore_lease(lease_id, spec.group_id, (worker_id, incarnation), now())
            self._remember((worker_id, request_id), lease_id)
        await self._settle([e for e in ended if e])

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
        self._records.leased(lease.group.group_id, now())
        write = self._journal.leased(lease, request.incarnation, request.request_id, self.run_epoch)
        task = self._journaling[lease_id] = self._start(write)
        task.add_done_callback(lambda _: self._journaling.pop(lease_id))
        return True

    def _remember(self, asked: tuple[str, str], lease_id: str) -> None:
        self._answers[asked] = lease_id
        while len(self._answers) > _REMEMBERED_REQUESTS:
            self._answers.popitem(last=False)

    async def _settle(self, ended: Sequence[Ended]) -> None:
        """Hand complete groups on; journal dropped ones, with those that replace them."""
        dropped = [e for e in ended if e.reason]
        requeued = [spec for e in dropped if (spec := self._replacement(e))]
        for group in ended:
            ready = self._records.ready(group, now())
            if group.reason:
                self.tally.dropped(group.reason, ready)
                self._forget([group.group.group_id])
            elif group.group.purpose is Purpose.TRAIN:
                self.batcher.add(ready)
            else:
                self._forget([group.group.group_id])
                self.on_eval_group(ready)
        if dropped:
            await self._journal.drop_groups(dropped, requeued)
        self.book.add(requeued)
        await self.notify()

    async def _drop_stale(self) -> int:
        """End what the next step may no longer train on; returns the trainer's version."""
        version = self.book.policy.version if self.book.policy else 0
        ended = self.book.drop_stale(self.batcher.oldest_allowed(version))
        for group in self.batcher.drop_stale(version):
            keys = tuple(record.trajectory.key for record in group.graded)
            ended.append(Ended(group.spec, keys, group.oldest_version or 0, "stale"))
        if ended:
            await self._settle(ended)
        return version

    def _replacement(self, ended: Ended) -> GroupSpec | None:
        """A new group for a task that failed, or none when it is quarantined."""
        spec = ended.group
        if ended.reason != "too_few_graded" or spec.purpose is not Purpose.TRAIN:
            return None
        if spec.requeues >= self._max_requeues:
            self.tally.quarantined(spec)
            return None
        return spec.requeued()

    def _forget(self, group_ids: Iterable[str]) -> None:
        ids = list(group_ids)
        self.book.free(ids)
        self._records.forget(ids)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` to its end even when the caller goes away."""
        return await asyncio.shield(self._start(work))


def _ignore(group: ReadyGroup) -> None:
    """Nobody evaluates."""
