"""Intake of trajectories: each is judged, journaled, then recorded in the lease book."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.common.aio.background_tasks import BackgroundTasks
from services.common.domain.attempts import AttemptKey
from services.common.domain.policy import PolicyId
from services.common.domain.trajectory import Trajectory
from services.common.rpc.deadlines import loop_time
from services.common.run_folder import trajectory_codec
from services.learner.group_types import GroupSpec
from services.learner.groups.batcher import make_record
from services.learner.groups.group_endings import GroupEndings
from services.learner.groups.leases import LeaseBook
from services.learner.groups.open_groups import LeaseLostError
from services.learner.groups.policy_provenance import Provenance
from services.learner.journal.attempt_tables import ContentConflictError
from services.learner.journal.store import Journal

# Reason for not using a try whose worker has not proved that it serves the policy it claims.
_UNVERIFIED = "unverified_policy"


@dataclass(frozen=True, slots=True)
class Receipt:
    """Answer to a worker's submission."""

    repeated: bool
    group_complete: bool


@dataclass
class TrajectoryIntake:
    """Takes finished tries. `changed` is notified when a policy is reported."""

    # Time that a trajectory waits for the report on a policy that wrote some of it.
    report_grace_s = 5.0

    book: LeaseBook
    journal: Journal
    provenance: Provenance
    endings: GroupEndings
    changed: asyncio.Condition

    def __post_init__(self) -> None:
        self._writes = BackgroundTasks()

    async def admit_attempt(self, lease_id: str, worker_id: str, key: AttemptKey) -> bool:
        """Permit a try to be sent, before any of it is read.

        Return False if it is already journaled: repeating it needs no lease. Raises
        LeaseLostError or ValueError."""
        try:
            self.check_holder(lease_id, worker_id)
            self.book.check_attempt(lease_id, key, loop_time())
        except LeaseLostError:
            if await self.journal.record_digest(key) is None:
                raise
            return False
        return True

    def check_holder(self, lease_id: str, worker_id: str) -> None:
        """Check that the lease is valid and belongs to this worker. Raises LeaseLostError."""
        holder = self.book.find_lease(lease_id)
        if holder is None or holder.worker_id != worker_id:
            why = "it has ended" if holder is None else "it is another worker's"
            raise LeaseLostError(f"worker {worker_id!r} has no lease {lease_id!r}: {why}")

    async def submit_trajectory(self, trajectory: Trajectory) -> Receipt:
        """Take a finished try; when this returns it is durable.

        Raises LeaseLostError, ContentConflictError, UnknownPolicyError or ValueError.
        """
        try:
            spec = self.book.check_attempt(trajectory.lease_id, trajectory.key, loop_time())
        except LeaseLostError:
            known = await self.journal.record_digest(trajectory.key)
            if known is None:
                raise
            if known != trajectory_codec.record_digest(trajectory):
                raise ContentConflictError(
                    f"other content is already journaled under {trajectory.key}"
                ) from None
            return Receipt(repeated=True, group_complete=True)
        _check_temperature(spec, trajectory)
        self.provenance.check_published(trajectory.policies)
        holder = self.book.find_lease(trajectory.lease_id)
        worker_id = holder.worker_id if holder else ""
        refusals = self.provenance.refusal_count(worker_id)

        def is_trusted() -> bool:
            return self.provenance.refusal_count(worker_id) == refusals

        served = await self._wait_for_report(worker_id, trajectory.policies) and is_trusted()
        dropped = "" if served else _UNVERIFIED
        return await self._writes.run_shielded(
            self._store_trajectory(spec, trajectory, dropped, is_trusted)
        )

    async def _wait_for_report(self, worker_id: str, policies: Sequence[PolicyId]) -> bool:
        """Wait briefly until a worker proves that it serves these policies; else return False.

        An engine samples from new weights before its report arrives."""
        try:
            async with asyncio.timeout(self.report_grace_s), self.changed:
                await self.changed.wait_for(lambda: self.provenance.has_shown(worker_id, policies))
        except TimeoutError:
            return False
        return True

    async def _store_trajectory(
        self, spec: GroupSpec, trajectory: Trajectory, dropped: str, trusted: Callable[[], bool]
    ) -> Receipt:
        """Journal a try and record it; `trusted` returns True while its worker is trusted."""
        why = dropped or self.provenance.why_unusable(spec, trajectory.policies)
        record = make_record(trajectory, why)
        new = await self.journal.add_trajectory(trajectory, record.dropped)
        if new and not record.dropped and not trusted():
            record = replace(record, dropped=_UNVERIFIED)
            await self.journal.drop_try(trajectory.key, _UNVERIFIED)
        if new and not self.book.waits_for(trajectory.key):
            # Its group or its attempt ended during the write.
            await self.journal.drop_try(trajectory.key, "late")
        elif new and (ended := self.endings.take_record(spec, record)):
            await self.endings.settle_groups([ended])
        complete = self.book.find_lease(trajectory.lease_id) is None
        return Receipt(repeated=not new, group_complete=complete)


def _check_temperature(spec: GroupSpec, trajectory: Trajectory) -> None:
    """Check that every policy token was sampled at the lease's temperature, used for scoring.

    Raises ValueError."""
    leased = np.float32(spec.temperature)
    spans = [span for sequence in trajectory.sequences for span in sequence.spans]
    for span in spans:
        if span.temperature is not None and np.float32(span.temperature) != leased:
            raise ValueError(f"sampled at temperature {span.temperature}, not the lease's {leased}")
