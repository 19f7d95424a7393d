"""Requests for leases, and their answers: a repeated request gets the same lease again."""

import asyncio
from dataclasses import dataclass

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.domain.policy import PolicyId
from flotilla_learner.group_types import Lease
from flotilla_learner.groups.task_groups import FreshGroups
from flotilla_learner.journal.store import Journal

_REMEMBERED_REQUESTS = 4096


class DrainingError(Exception):
    """The learner grants no more leases."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """One poll of a worker."""

    request_id: str
    worker_id: str
    incarnation: str
    # Policy that the engine serves, according to the worker.
    holding: PolicyId | None
    free_attempts: int
    capabilities: frozenset[str] = frozenset()


class LeaseAnswers:
    """Newest answers, journaled or on their way there."""

    def __init__(self, journal: Journal, fresh: FreshGroups, run_epoch: int) -> None:
        self._journal = journal
        self._fresh = fresh
        self._run_epoch = run_epoch
        # Leases by (worker_id, request_id).
        self._lease_ids: BoundedDict[tuple[str, str], str] = BoundedDict(_REMEMBERED_REQUESTS)
        self._journaling: dict[str, asyncio.Task[None]] = {}
        self._writes = BackgroundTasks()

    def find_lease_id(self, request: LeaseRequest) -> str | None:
        """Return the lease that a request got, if any."""
        return self._lease_ids.get((request.worker_id, request.request_id))

    def remember_lease(self, worker_id: str, request_id: str, lease_id: str) -> None:
        self._lease_ids[worker_id, request_id] = lease_id

    def answer_request(self, request: LeaseRequest, lease: Lease) -> None:
        """Answer a request with a lease, and start to journal it."""
        self.remember_lease(request.worker_id, request.request_id, lease.lease_id)
        task = self._writes.start_task(self._journal_lease(lease, request))
        self._journaling[lease.lease_id] = task
        task.add_done_callback(lambda _: self._journaling.pop(lease.lease_id))

    async def wait_until_journaled(self, lease_id: str) -> None:
        if writing := self._journaling.get(lease_id):
            await asyncio.shield(writing)

    async def _journal_lease(self, lease: Lease, request: LeaseRequest) -> None:
        """Journal a lease, with all groups drawn before it."""
        drawn = self._fresh.unjournaled
        await self._journal.add_lease(
            lease, request.incarnation, request.request_id, self._run_epoch, drawn
        )
        self._fresh.mark_journaled(drawn)
