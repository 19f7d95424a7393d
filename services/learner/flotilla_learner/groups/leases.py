"""The lease book: which worker may sample which group. No I/O, no clock of its own; every time
is an argument in seconds.

    fresh or requeued --lease--> leased --all attempts ended--> complete --free--> (gone)
                          ^         |                              |
                          +--lost---+------deadline, stale-------- dropped --> (gone)

A TRAIN group holds one of `(max_staleness + 1) * groups_per_step` slots from its first
lease until it is gone. Slots are never counted up and down: the groups that hold one are
the groups in the book, so none can leak. EVAL groups have slots of their own."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from math import inf

from flotilla_common.domain.attempts import AttemptKey, Purpose
from flotilla_common.domain.policy import PolicyId
from flotilla_learner.group_types import EndedGroup, GroupSpec, Lease, SubmittedTry
from flotilla_learner.groups.group_queue import GroupQueue
from flotilla_learner.groups.open_groups import (
    TOO_FEW_GRADED,
    AttemptProgress,
    LeaseLostError,
    LeaseRules,
    OpenGroup,
)
from flotilla_learner.groups.staleness import STALE, is_stale
from flotilla_learner.groups.workers import RolloutWorker, WorkerRoster


class LeaseBook:
    """Book of leases for fresh groups from `next_group`, requeued ones, and lost ones again."""

    def __init__(self, rules: LeaseRules, next_group: Callable[[], GroupSpec]) -> None:
        self.rules = rules
        # Newest published policy; nothing is leased without one.
        self.policy: PolicyId | None = None
        # TRAIN groups that may hold a slot now, below the rule's bound near a run's end.
        self.train_slots = rules.train_slots
        self._backlog = GroupQueue(next_group, bound=rules.train_slots)
        self._groups: dict[str, OpenGroup] = {}
        self._lost: deque[str] = deque()
        self._leases: dict[str, str] = {}
        self.workers = WorkerRoster(ttl_s=rules.ttl_s)

    # --- workers

    def greet_worker(self, worker_id: str, incarnation: str, now: float) -> RolloutWorker | None:
        """Record that a worker is alive; a new incarnation ends its predecessor's leases.

        A replaced process changes nothing, and gets None."""
        if self.workers.was_replaced(worker_id, incarnation):
            return None
        worker = self.workers.find_worker(worker_id)
        if worker is None or worker.incarnation != incarnation:
            self.end_leases_of(worker_id)
            worker = self.workers.replace_worker(worker_id, incarnation, now)
        worker.seen = now
        return worker

    def end_leases_of(self, worker_id: str) -> None:
        """Take all work back from an absent worker."""
        if worker := self.workers.find_worker(worker_id):
            for lease_id in worker.leases.copy():
                self._lose_lease(lease_id)

    # --- leases

    def lease_next(
        self, worker_id: str, free_attempts: int, lease_id: str, now: float
    ) -> Lease | None:
        """Give a greeted worker the next group that it may have, if any."""
        worker = self.workers[worker_id]
        worker.seen = now
        if self.policy is None or free_attempts < 1:
            return None
        for purpose in (Purpose.EVAL, Purpose.TRAIN):
            if not self._may_have_more(worker, purpose, now):
                continue
            if group := self._pick_group(worker, purpose, free_attempts, now):
                return self._grant_lease(group, worker_id, lease_id, now)
        return None

    def renew_leases(self, worker_id: str, lease_ids: Iterable[str], now: float) -> list[str]:
        """Extend leases; return those that are lost."""
        if worker := self.workers.find_worker(worker_id):
            worker.seen = now
        lost: list[str] = []
        for lease_id in lease_ids:
            group = self._leased_group(lease_id)
            if group and group.lease and group.lease.worker_id == worker_id:
                group.expires = now + self.rules.ttl_s
            else:
                lost.append(lease_id)
        return lost

    def release_leases(self, worker_id: str, lease_ids: Iterable[str]) -> None:
        """Take back a worker's returned leases; ignore those of other workers."""
        for lease_id in lease_ids:
            group = self._leased_group(lease_id)
            if group and group.lease and group.lease.worker_id == worker_id:
                self._lose_lease(lease_id)

    def find_lease(self, lease_id: str) -> Lease | None:
        """Return the lease if it is still valid."""
        group = self._leased_group(lease_id)
        return group.lease if group else None

    def check_holder(self, attempt: SubmittedTry) -> OpenGroup:
        """Return the group of a try's lease, if its worker holds it. Raises LeaseLostError."""
        group = self._leased_group(attempt.lease_id)
        if group and group.lease and group.lease.worker_id == attempt.worker_id:
            return group
        why = "it is another worker's" if group else "it has ended"
        raise LeaseLostError(
            f"worker {attempt.worker_id!r} has no lease {attempt.lease_id!r}: {why}"
        )

    def check_attempt(self, attempt: SubmittedTry, now: float) -> GroupSpec:
        """Check that its worker may submit a try; renew the lease. Raises LeaseLostError, or
        ValueError if its group takes no such try."""
        group, key = self.check_holder(attempt), attempt.key
        if group.spec.group_id != key.group_id or group.expires <= now:
            raise LeaseLostError(
                f"lease {attempt.lease_id!r} does not cover group {key.group_id!r}"
            )
        if key.attempt_index >= group.spec.size or key.attempt_try >= self.rules.max_tries:
            raise ValueError(
                f"attempt {key.attempt_index} try {key.attempt_try} is out of bounds: the group"
                f" has {group.spec.size} attempts of at most {self.rules.max_tries} tries"
            )
        progress = group.attempts[key.attempt_index]
        if progress.ended and key.attempt_try >= progress.next_try:
            raise ValueError(f"attempt {key.attempt_index} has ended: it accepts no other try")
        group.expires = now + self.rules.ttl_s
        return group.spec

    def record_attempt(
        self, key: AttemptKey, *, graded: bool, oldest_version: int | None, drop: str = ""
    ) -> EndedGroup | None:
        """Record the end of a try; return its group if that ended it.

        A group ends when it is complete or, with a reason to `drop` it, when all of it is
        useless. A try of a group that is gone, or of an attempt that has ended, changes
        nothing."""
        if not self.waits_for(key):
            return None
        group = self._groups[key.group_id]
        if drop:
            return self._end_group(group, drop)
        attempt = group.attempts[key.attempt_index]
        attempt.next_try = max(attempt.next_try, key.attempt_try + 1)
        if graded:
            group.record_grade(key, oldest_version)
        attempt.ended = graded or attempt.next_try >= self.rules.max_tries
        return None if group.missing_attempts else self._end_group(group)

    def expire_leases(self, now: float) -> list[EndedGroup]:
        """Take back overdue leases, and end groups whose deadline has passed."""
        for group in list(self._groups.values()):
            if group.lease and group.expires <= now:
                self._lose_lease(group.lease.lease_id)
        overdue = [g for g in self._groups.values() if not g.complete and g.deadline <= now]
        self.workers.forget_absent(now)
        return [self._end_group(group) for group in overdue]

    # --- groups

    def add_groups(self, specs: Iterable[GroupSpec]) -> None:
        """Queue groups to be leased before all fresh ones."""
        self._backlog.add_groups(specs)

    def drop_groups(self, group_ids: Collection[str], reason: str) -> list[EndedGroup]:
        """End incomplete groups, whatever they have."""
        self._backlog.drop_groups(group_ids)
        known = [self._groups[i] for i in group_ids if i in self._groups]
        return [self._end_group(group, reason) for group in known if not group.complete]

    def drop_stale(self, oldest_allowed: int) -> list[EndedGroup]:
        """End the open TRAIN groups with an attempt older than a version."""
        stale = [
            group.spec.group_id
            for group in self._groups.values()
            if group.spec.purpose is Purpose.TRAIN and is_stale(group, oldest_allowed)
        ]
        return self.drop_groups(stale, STALE)

    def free_groups(self, group_ids: Iterable[str]) -> None:
        """Remove complete groups: trained and published, dropped, filtered or evaluated."""
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    def restore_group(self, spec: GroupSpec, now: float) -> None:
        """Restore a group that was leased before a restart, without its lease."""
        self._groups[spec.group_id] = self._open_group(spec, now)
        self._lost.append(spec.group_id)

    def restore_lease(
        self, lease_id: str, group_id: str, worker: tuple[str, str], now: float
    ) -> None:
        """Restore the lease of a restored group, so that its worker can renew it."""
        worker_id, incarnation = worker
        self.greet_worker(worker_id, incarnation, now)
        group = self._groups.get(group_id)
        if group and not group.complete and group.lease is None:
            self._lost.remove(group_id)
            self._grant_lease(group, worker_id, lease_id, now)

    def missing_capabilities(self, now: float) -> frozenset[str]:
        """Return the capabilities that waiting groups need and no live worker has."""
        if not self.workers.any_alive(now):
            return frozenset()
        specs = [*self._backlog, *(self._groups[group_id].spec for group_id in self._lost)]
        needed = frozenset[str]().union(*(spec.task.needs for spec in specs))
        return needed - self.workers.live_capabilities(now)

    def waits_for(self, key: AttemptKey) -> bool:
        """Return True if a try would still change its group: neither is over."""
        group = self._groups.get(key.group_id)
        return bool(group and not group.complete and not group.attempts[key.attempt_index].ended)

    def open_since(self, env: str) -> float:
        """Return the first lease time of an environment's oldest incomplete group; infinity if
        there is none."""
        own = (g for g in self._groups.values() if g.spec.task.env_key == env and not g.complete)
        return min((g.deadline - self.rules.group_deadline_s for g in own), default=inf)

    # --- counts

    def held_slots(self, purpose: Purpose = Purpose.TRAIN) -> int:
        return sum(1 for group in self._groups.values() if group.spec.purpose is purpose)

    @property
    def leased_groups(self) -> int:
        return len(self._leases)

    @property
    def free_slots(self) -> int:
        return max(0, self.train_slots - self.held_slots())

    # --- inside

    def _may_have_more(self, worker: RolloutWorker, purpose: Purpose, now: float) -> bool:
        slots = self.train_slots if purpose is Purpose.TRAIN else self.rules.eval_slots
        if not slots:
            return False
        share = self.workers.slot_share(worker, slots, now)
        specs = [group.spec for lease in worker.leases if (group := self._leased_group(lease))]
        return sum(1 for spec in specs if spec.purpose is purpose) < share

    def _pick_group(
        self, worker: RolloutWorker, purpose: Purpose, free_attempts: int, now: float
    ) -> OpenGroup | None:
        for group_id in self._lost:
            group = self._groups[group_id]
            if group.spec.purpose is purpose and worker.can_take(group, self.policy, free_attempts):
                self._lost.remove(group_id)
                return group
        spec = self._next_unleased(worker, purpose)
        if spec is None:
            return None
        group = self._open_group(spec, now)
        if not worker.can_take(group, self.policy, free_attempts):
            return None
        self._backlog.take_group(spec)
        self._groups[spec.group_id] = group
        return group

    def _next_unleased(self, worker: RolloutWorker, purpose: Purpose) -> GroupSpec | None:
        train = purpose is Purpose.TRAIN
        slots = self.free_slots if train else self.rules.eval_slots - self.held_slots(purpose)
        return self._backlog.find_next(purpose, worker.capabilities) if slots > 0 else None

    def _open_group(self, spec: GroupSpec, now: float) -> OpenGroup:
        deadline = now + self.rules.group_deadline_s
        return OpenGroup(spec, [AttemptProgress() for _ in range(spec.size)], deadline)

    def _grant_lease(self, group: OpenGroup, worker_id: str, lease_id: str, now: float) -> Lease:
        policy = group.spec.exact_policy or self.policy or PolicyId(0, 0)
        lease = Lease(
            lease_id, group.spec, group.missing_attempts, policy, worker_id, group.deadline
        )
        group.lease, group.expires = lease, now + self.rules.ttl_s
        self._leases[lease_id] = group.spec.group_id
        self.workers[worker_id].leases.add(lease_id)
        return lease

    def _leased_group(self, lease_id: str) -> OpenGroup | None:
        group_id = self._leases.get(lease_id)
        return self._groups[group_id] if group_id is not None else None

    def _lose_lease(self, lease_id: str) -> None:
        if group := self._leased_group(lease_id):
            self._end_lease(group)
            self._lost.append(group.spec.group_id)

    def _end_lease(self, group: OpenGroup) -> None:
        if group.lease:
            del self._leases[group.lease.lease_id]
            self.workers[group.lease.worker_id].leases.discard(group.lease.lease_id)
            group.lease = None

    def _end_group(self, group: OpenGroup, reason: str = "") -> EndedGroup:
        """Complete a group that has enough graded attempts; drop it otherwise."""
        self._end_lease(group)
        if group.spec.group_id in self._lost:
            self._lost.remove(group.spec.group_id)
        group.complete = True
        needed = self.rules.min_group if group.spec.purpose is Purpose.TRAIN else 0
        if not reason and len(group.graded_keys) < needed:
            reason = TOO_FEW_GRADED
        if reason:
            del self._groups[group.spec.group_id]
        oldest = group.oldest_version
        return EndedGroup(group.spec, group.graded_keys, -1 if oldest is None else oldest, reason)
