"""Trajectories on their way in: judged, journaled, then noted in the lease book."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.learner import trajectory as trajectories
from services.learner.groups.background import Writes
from services.learner.groups.batcher import record_of
from services.learner.groups.completion import Endings
from services.learner.groups.leases import LeaseBook
from services.learner.groups.messages import Receipt, check_temperature, now
from services.learner.groups.provenance import Provenance
from services.learner.groups.types import GroupSpec, LeaseLostError
from services.learner.journal.attempts import ContentConflictError
from services.learner.journal.store import Journal
from services.learner.trajectory import Trajectory
from services.learner.types import AttemptKey, PolicyId

# Why a try is not used whose worker has not shown that it serves what it says.
_UNVERIFIED = "unverified_policy"


class Intake:
    """Takes finished tries. `changed` is notified when a policy was reported."""

    # How long a trajectory waits for the report on a policy that wrote some of it.
    report_grace_s = 5.0

    def __init__(
        self,
        book: LeaseBook,
        journal: Journal,
        provenance: Provenance,
        endings: Endings,
        changed: asyncio.Condition,
    ) -> None:
        self._book = book
        self._journal = journal
        self._provenance = provenance
        self._endings = endings
        self._changed = changed
        self._writes = Writes()

    async def admit(self, lease_id: str, worker_id: str, key: AttemptKey) -> bool:
        """Leave to send a try, before any of it is read; False for one that is journaled already,
        which needs no lease to be repeated.

        Raises LeaseLostError or ValueError.
        """
        try:
            self.check_holder(lease_id, worker_id)
            self._book.check(lease_id, key, now())
        except LeaseLostError:
            if await self._journal.record_digest(key) is None:
                raise
            return False
        return True

    def check_holder(self, lease_id: str, worker_id: str) -> None:
        """Raises LeaseLostError unless the lease is good, and this worker's."""
        holder = self._book.holder(lease_id)
        if holder is None or holder.worker_id != worker_id:
            why = "it has ended" if holder is None else "it is another worker's"
            raise LeaseLostError(f"worker {worker_id!r} has no lease {lease_id!r}: {why}")

    async def submit(self, trajectory: Trajectory) -> Receipt:
        """Take a finished try; when this returns it is durable.

        Raises LeaseLostError, ContentConflictError, UnknownPolicyError or ValueError.
        """
        try:
            spec = self._book.check(trajectory.lease_id, trajectory.key, now())
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
        holder = self._book.holder(trajectory.lease_id)
        worker_id = holder.worker_id if holder else ""
        refusals = self._provenance.refusals(worker_id)

        def trusted() -> bool:
            return self._provenance.refusals(worker_id) == refusals

        served = await self._served(worker_id, trajectory.policies) and trusted()
        dropped = "" if served else _UNVERIFIED
        return await self._writes.finish(self._store(spec, trajectory, dropped, trusted))

    async def _served(self, worker_id: str, policies: Sequence[PolicyId]) -> bool:
        """Whether a worker has shown, or shows in a moment, that it serves these policies: an
        engine samples from new weights before its report arrives."""
        try:
            async with asyncio.timeout(self.report_grace_s), self._changed:
                await self._changed.wait_for(lambda: self._provenance.shown(worker_id, policies))
        except TimeoutError:
            return False
        return True

    async def _store(
        self, spec: GroupSpec, trajectory: Trajectory, dropped: str, trusted: Callable[[], bool]
    ) -> Receipt:
        """`trusted` says whether its worker is, still."""
        why = dropped or self._provenance.unusable(spec, trajectory.policies)
        record = record_of(trajectory, why)
        new = await self._journal.receive(trajectory, record.dropped)
        if new and not record.dropped and not trusted():
            record = replace(record, dropped=_UNVERIFIED)
            await self._journal.drop_try(trajectory.key, _UNVERIFIED)
        if new and not self._book.waits_for(trajectory.key):
            # Its group or its attempt came to its end while this was written.
            await self._journal.drop_try(trajectory.key, "late")
        elif new and (ended := self._endings.take(spec, record)):
            await self._endings.settle([ended])
        complete = self._book.holder(trajectory.lease_id) is None
        return Receipt(repeated=not new, group_complete=complete)
