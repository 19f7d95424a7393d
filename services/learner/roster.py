"""The rollout workers that the lease book knows. No clock of its own."""

from dataclasses import dataclass, field
from math import ceil

from services.learner.types import PolicyId


@dataclass(slots=True)
class Worker:
    """One rollout process."""

    incarnation: str
    seen: float
    devices: int = 1
    attached: bool = False
    holding: PolicyId | None = None
    leases: set[str] = field(default_factory=set[str])


class Roster:
    """Who lives, what each serves, and each one's fair share of the slots."""

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._workers: dict[str, Worker] = {}

    def __getitem__(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def replace(self, worker_id: str, incarnation: str, now: float) -> None:
        """Take in a new process under its id; its predecessor must hold nothing any more."""
        self._workers[worker_id] = Worker(incarnation, now)

    def attach(self, worker_id: str, devices: int) -> None:
        """Count a worker's devices in everybody's fair share."""
        worker = self._workers[worker_id]
        worker.devices, worker.attached = max(1, devices), True

    def detach(self, worker_id: str) -> None:
        """A worker's stream is gone: it counts only while it calls."""
        if worker := self._workers.get(worker_id):
            worker.attached = False

    def holds(self, worker_id: str, policy: PolicyId | None) -> None:
        """Note what a worker's engine serves; news that arrives late changes nothing."""
        worker = self._workers.get(worker_id)
        if worker and policy and (worker.holding is None or policy > worker.holding):
            worker.holding = policy

    def share(self, worker: Worker, slots: int, now: float) -> int:
        """Slots that a worker may have by its devices; at least 1."""
        devices = sum(w.devices for w in self._workers.values() if self._alive(w, now))
        return max(1, ceil(slots * worker.devices / max(1, devices)))

    def forget_absent(self, now: float) -> None:
        """Drop workers that hold nothing and no longer call."""
        for worker_id, worker in list(self._workers.items()):
            if not worker.leases and not self._alive(worker, now):
                del self._workers[worker_id]

    def _alive(self, worker: Worker, now: float) -> bool:
        return worker.attached or now - worker.seen < self._ttl_s
