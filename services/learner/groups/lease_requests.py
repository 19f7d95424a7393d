"""Small parts of the dispatcher: requests, receipts, refusals, its clock and its seeds."""

import asyncio
import hashlib
from dataclasses import dataclass

import numpy as np

from services.common.domain.policy import PolicyId
from services.common.domain.trajectory import Trajectory
from services.learner.group_types import GroupSpec


class UnknownPolicyError(ValueError):
    """A trajectory names a policy that was never published."""


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


@dataclass(frozen=True, slots=True)
class Receipt:
    """Answer to a worker's submission."""

    repeated: bool
    group_complete: bool


def check_temperature(spec: GroupSpec, trajectory: Trajectory) -> None:
    """Check that every policy token was sampled as the lease said; the trainer scores it so.

    Raises ValueError."""
    leased = np.float32(spec.temperature)
    spans = [span for sequence in trajectory.sequences for span in sequence.spans]
    for span in spans:
        if span.temperature is not None and np.float32(span.temperature) != leased:
            raise ValueError(f"sampled at temperature {span.temperature}, the lease says {leased}")


def loop_time() -> float:
    """Return monotonic seconds; every time in the lease book is on this clock."""
    return asyncio.get_running_loop().time()


def attempt_seed(seed: int, group_id: str, attempt_index: int, attempt_try: int) -> int:
    """Return 63 bits, a function of the run's seed and the try alone."""
    text = f"{seed}/{group_id}/{attempt_index}/{attempt_try}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
