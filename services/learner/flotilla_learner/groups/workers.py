"""Roster of the rollout workers in the lease book. No clock of its own."""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from flotilla_common.domain.policy import PolicyId
from flotilla_learner.groups.open_groups import OpenGroup

# Most incarnations and policies remembered of one worker id.
_REMEMBERED = 256
# Far more than any run has; a bound for clients that invent workers.
_MOST_WORKERS = 4096


class TooManyWorkersError(Exception):
    """More workers than any run has are already known."""


@dataclass(slots=True)
class RolloutWorker:
    """One rollout process."""

    incarnation: str
    seen: float
    devices: int = 1
    attached: bool = False
    # Policy that its engine serves: the newest one with a correct canary. A worker's mere claim is
    # not trusted.
    holding: PolicyId | None = None
    # Every policy that it reported and was accepted for.
    served: deque[PolicyId] = field(default_factory=lambda: deque[PolicyId](maxlen=_REMEMBERED))
    # Times that it served, or may have served, something other than it should.
    refusals: int = 0
    capabilities: frozenset[str] = frozenset()
    leases: set[str] = field(default_factory=set[str])

    def can_take(self, group: OpenGroup, newest: PolicyId | None, free_attempts: int) -> bool:
        """Return True if it serves the group's policy, can do its task, and has room."""
        if self.holding is None or newest is None:
            return False
        exact = group.spec.exact_policy
        if self.holding != exact if exact else self.holding < newest:
            return False
        if not group.spec.task.needs <= self.capabilities:
            return False
        # A worker smaller than a group still takes one if it has nothing else.
        return free_attempts >= len(group.missing_attempts) or not self.leases


class WorkerRoster:
    """Live workers with their policies, capabilities and fair shares of the slots."""

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._workers: dict[str, RolloutWorker] = {}
        self._replaced: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)

    def __getitem__(self, worker_id: str) -> RolloutWorker:
        return self._workers[worker_id]

    def find_worker(self, worker_id: str) -> RolloutWorker | None:
        return self._workers.get(worker_id)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(self._workers)

    def replace_worker(self, worker_id: str, incarnation: str, now: float) -> RolloutWorker:
        """Register a new process under its id; its predecessor must hold no leases.

        Raises TooManyWorkersError.
        """
        if old := self._workers.get(worker_id):
            self._replaced.append((worker_id, old.incarnation))
        elif len(self._workers) >= _MOST_WORKERS:
            raise TooManyWorkersError(f"{len(self._workers)} workers are already known")
        worker = self._workers[worker_id] = RolloutWorker(incarnation, now)
        return worker

    def was_replaced(self, worker_id: str, incarnation: str) -> bool:
        """Return True if a process has a successor: it must not take its place back."""
        return worker_id in self._workers and (worker_id, incarnation) in self._replaced

    def attach_worker(self, worker_id: str, devices: int) -> None:
        """Count a worker's devices in every worker's fair share."""
        worker = self._workers[worker_id]
        worker.devices, worker.attached = max(1, devices), True

    def detach_worker(self, worker_id: str) -> None:
        """Record that a worker's stream is gone: it counts only while it calls."""
        if worker := self._workers.get(worker_id):
            worker.attached = False

    def mark_serving(self, worker_id: str, policy: PolicyId) -> None:
        """Record a worker's correct canary; a later report of an older one does not revoke it."""
        if worker := self._workers.get(worker_id):
            if policy not in worker.served:
                worker.served.append(policy)
            if worker.holding is None or policy > worker.holding:
                worker.holding = policy

    def mark_not_serving(self, worker_id: str, refused: PolicyId) -> None:
        """Record that a worker's canary was wrong or its load incomplete: it gets no work."""
        if worker := self._workers.get(worker_id):
            worker.holding = None
            worker.refusals += 1
            if refused in worker.served:
                worker.served.remove(refused)

    def live_capabilities(self, now: float) -> frozenset[str]:
        live = [w.capabilities for w in self._workers.values() if self._is_alive(w, now)]
        return frozenset[str]().union(*live)

    def any_alive(self, now: float) -> bool:
        return any(self._is_alive(worker, now) for worker in self._workers.values())

    def slot_share(self, worker: RolloutWorker, slots: int, now: float) -> int:
        """Return the slots that a worker may have by its devices; at least 1."""
        devices = sum(w.devices for w in self._workers.values() if self._is_alive(w, now))
        return max(1, ceil(slots * worker.devices / max(1, devices)))

    def forget_absent(self, now: float) -> None:
        """Drop workers that hold nothing and no longer call."""
        for worker_id, worker in list(self._workers.items()):
            if not worker.leases and not self._is_alive(worker, now):
                del self._workers[worker_id]

    def _is_alive(self, worker: RolloutWorker, now: float) -> bool:
        return worker.attached or now - worker.seen < self._ttl_s
