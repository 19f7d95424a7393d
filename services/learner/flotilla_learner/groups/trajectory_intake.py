"""Intake of trajectories: each try is admitted, judged, and stored: in the journal, then in the
lease book."""

from dataclasses import dataclass

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.domain.attempts import Purpose
from flotilla_common.rpc.deadlines import loop_time
from flotilla_learner.group_types import SubmittedTry
from flotilla_learner.groups.graded_attempts import make_record
from flotilla_learner.groups.group_endings import GroupEndings
from flotilla_learner.groups.leases import LeaseBook
from flotilla_learner.groups.open_groups import LeaseLostError
from flotilla_learner.groups.policy_provenance import UNVERIFIED, Provenance
from flotilla_learner.journal.store import Journal


@dataclass(frozen=True, slots=True)
class Receipt:
    """Answer to a worker's submission."""

    repeated: bool
    group_complete: bool


@dataclass
class TrajectoryIntake:
    """Takes finished tries."""

    book: LeaseBook
    journal: Journal
    provenance: Provenance
    endings: GroupEndings
    # True if groups may await a verdict.
    judged: bool = False

    def __post_init__(self) -> None:
        self._writes = BackgroundTasks()

    async def admit_try(self, attempt: SubmittedTry) -> None:
        """Permit a try to be sent, before any of it is read. Raises LeaseLostError or ValueError.

        Repeating one that is already journaled needs no lease."""
        try:
            attempt.group = self.book.check_attempt(attempt, loop_time())
            attempt.leased = True
        except LeaseLostError:
            attempt.leased = False
            if not await self.journal.has_try(attempt.key):
                raise

    async def submit_try(self, attempt: SubmittedTry) -> Receipt:
        """Take a finished try that was read whole; when this returns it is durable.

        Raises LeaseLostError, ContentConflictError, UnknownPolicyError or ValueError."""
        # Its lease may have ended while it was read.
        await self.admit_try(attempt)
        if attempt.leased:
            self._check_judged(attempt)
            await self.provenance.judge_try(attempt)
        return await self._writes.run_shielded(self._store_try(attempt))

    def _check_judged(self, attempt: SubmittedTry) -> None:
        """Raise ValueError for a try that awaits a verdict which nobody will give."""
        if not attempt.trajectory.judged:
            return
        if attempt.group.purpose is Purpose.EVAL:
            raise ValueError("to_be_judged: a judge does not compare the attempts of evaluations")
        if not self.judged:
            raise ValueError("to_be_judged: this run has no judge; add [learner.judge]")

    async def _store_try(self, attempt: SubmittedTry) -> Receipt:
        """Journal a try, and record it in the book if it is new; without a lease it never is."""
        new = await self.journal.add_trajectory(attempt.trajectory, attempt.dropped)
        if new and not attempt.dropped and not self.provenance.is_trusted(attempt):
            attempt.dropped = UNVERIFIED
            await self.journal.drop_try(attempt.key, UNVERIFIED)
        if new and not self.book.waits_for(attempt.key):
            # Its group or its attempt ended during the write.
            await self.journal.drop_try(attempt.key, "late")
        elif new:
            record = make_record(attempt.trajectory, attempt.dropped)
            if ended := self.endings.take_record(attempt.group, record):
                await self.endings.settle_groups([ended])
        complete = self.book.find_lease(attempt.lease_id) is None
        return Receipt(repeated=not new, group_complete=complete)
