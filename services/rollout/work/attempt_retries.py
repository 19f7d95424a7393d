"""Retries of a failed attempt: the tries left, and the pauses between them."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttemptRetries:
    """Remaining tries of one leased attempt, in the learner's numbering.

    `first_try` is the first that this lease may make: an earlier lease may have used others.
    `max_tries` is the learner's limit over all leases."""

    first_try: int
    max_tries: int
    pause_s: float

    def tries_left(self) -> range:
        """Return the numbers of the tries to make until one is graded."""
        return range(self.first_try, self.max_tries)

    def pause_after(self, number: int) -> float:
        """Return the seconds to pause after a failed try: doubled after each, with jitter, so that
        attempts that failed together do not retry together."""
        return self.pause_s * 2 ** (number - self.first_try) * random.uniform(0.5, 1.0)
