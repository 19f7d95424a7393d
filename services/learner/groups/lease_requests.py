"""Request of a worker for a lease."""

from dataclasses import dataclass

from services.common.domain.policy import PolicyId


class DrainingError(Exception):
    """No more work is given out."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """One poll of a worker."""

    request_id: str
    worker_id: str
    incarnation: str
    # What the worker says that its engine serves.
    holding: PolicyId | None
    free_attempts: int
    capabilities: frozenset[str] = frozenset()
