"""The dispatcher's small words: requests, receipts, refusals, its clock and its seeds."""

import asyncio
import hashlib
from dataclasses import dataclass

from services.learner.types import PolicyId


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
    holding: PolicyId | None
    free_attempts: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker is told about a submission."""

    repeated: bool
    group_complete: bool


def now() -> float:
    """Monotonic seconds; every time in the lease book is on this clock."""
    return asyncio.get_running_loop().time()


def attempt_seed(seed: int, group_id: str, attempt_index: int, attempt_try: int) -> int:
    """63 bits, a function of the run's seed and the try alone."""
    text = f"{seed}/{group_id}/{attempt_index}/{attempt_try}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
