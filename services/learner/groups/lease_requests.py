"""Request of a worker for a lease."""

from dataclasses import dataclass

from services.common.domain.policy import PolicyId


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
