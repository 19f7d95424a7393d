"""Roster of the rollout workers that the lease book knows. No clock of its own."""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from services.common.domain.policy import PolicyId
from services.learner.groups.open_groups import OpenGroup

# Incarnations and policies of one worker id that are remembered.
_REMEMBERED = 256
# Far more than any run has; whoever makes up workers finds an end.
_MOST_WORKERS = 4096


class TooManyWorkersError(Exception):
    """More workers than any run has are known already."""


@dataclass(slots=True)
class RolloutWorker:
    """One rollout process."""

    incarnation: str
    seen: float
    devices: int = 1
    attached: bool = False
    # What its engine serves: the newest policy whose canary was right. What a worker merely
    # claims to hold is not believed.
    holding: PolicyId | None = None
    # Every policy that it reported and was accepted for.
    served: deque[PolicyId] = field(default_factory=lambda: deque[PolicyId](maxlen=_REMEMBERED))
    # How often it was found, or feared, to serve something else than it should.
    refusals: int = 0
    capabilities: frozenset[str] = frozenset()
    leases: set[str] = field(default_factory=set[str])

    def can_take(self, group: OpenGroup, newest: PolicyId | None, free_attempts: int) -> bool:
        """Return True if it serves what the group asks for, can do its task, and has room."""
        if self.holding is None or newest is None:
            return False
        exact = group.spec.exact_policy
        if self.holding != exact if exact else self.holding < newest:
            return False
        if not group.spec.task.needs <= self.capabilities:
            return False
        # A worker smaller than a group takes one all the same when it has nothing else.
        return free_attempts >= len(group.missing_attempts) or not self.leases


class WorkerRoster:
    """Live workers, what each serves and can do, and each one's fair share of the slots."""

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
        """Ids of all workers that are known now."""
        return tuple(self._workers)

    def replace_worker(self, worker_id: str, incarnation: str, now: float) -> None:
        """Take in a new process under its id; its predecessor must hold nothing any more.

        Raises TooManyWorkersError.
        """
        if old := self._workers.get(worker_id):
            self._replaced.append((worker_id, old.incarnation))
        elif len(self._workers) >= _MOST_WORKERS:
            raise TooManyWorkersError(f"{len(self._workers)} workers are known already")
        self._workers[worker_id] = RolloutWorker(incarnation, now)

    def was_replaced(self, worker_id: str, incarnation: str) -> bool:
        """Return True if a process has a successor: it may not take its place back."""
        return worker_id in self._workers and (worker_id, incarnation) in self._replaced

    def attach_worker(self, worker_id: str, devices: int) -> None:
        """Count a worker's devices in everybody's fair share."""
        worker = self._workers[worker_id]
        worker.devices, worker.attached = max(1, devices), True

    def detach_worker(self, worker_id: str) -> None:
        """Note that a worker's stream is gone: it counts only while it calls."""
        if worker := self._workers.get(worker_id):
            worker.attached = False

    def mark_serving(self, worker_id: str, policy: PolicyId) -> None:
        """Note that a worker's canary was right; late news does not take that back."""
        if worker := self._workers.get(worker_id):
            if policy not in worker.served:
                worker.served.append(policy)
            if worker.holding is None or policy > worker.holding:
                worker.holding = policy

    def mark_not_serving(self, worker_id: str, refused: PolicyId) -> None:
        """Note that a worker's canary was wrong, or its engine is torn: it gets no work."""
        if worker := self._workers.get(worker_id):
            worker.holding = None
            worker.refusals += 1
            if refused in worker.served:
                worker.served.remove(refused)

    def live_capabilities(self, now: float) -> frozenset[str]:
        """Return the capabilities that at least one live worker has."""
        live = [w.capabilities for w in self._workers.values() if self._is_alive(w, now)]
        return frozenset[str]().union(*live)

    def any_alive(self, now: float) -> bool:
        """Return True if any worker is alive."""
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
