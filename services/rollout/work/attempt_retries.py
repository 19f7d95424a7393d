"""Retries of a failed attempt: which tries are left, and how long to pause before the next."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttemptRetries:
    """Tries of one leased attempt that are left, as the learner numbers them.

    `first_try` is the first that this lease may make: an earlier lease may have used others.
    `max_tries` is the learner's limit over all leases."""

    first_try: int
    max_tries: int
    pause_s: float

    def tries_left(self) -> range:
        """Return the numbers of the tries to make until one is graded."""
        return range(self.first_try, self.max_tries)

    def pause_after(self, number: int) -> float:
        """Return the seconds to pause after a failed try: twice as long after each, with jitter, so
        that attempts that failed together do not come back together."""
        return self.pause_s * 2 ** (number - self.first_try) * random.uniform(0.5, 1.0)
