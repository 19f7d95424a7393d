"""Which sequences each step imitates: a function of the seed and the step's number. Pure.

The sequences of all epochs, each a permutation of its own, form one endless row, from which every
step takes the next ones. So an epoch takes each sequence exactly once, a step may end one epoch and
begin the next, and neither earlier steps nor the number of ranks matter."""

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """Schedule over `sequences` sequences, `per_step` of them in each step."""

    sequences: int
    per_step: int
    seed: int

    def places_of(self, step: int) -> list[int]:
        """Return the places of the sequences of a step, which counts from 1, in order."""
        first = (step - 1) * self.per_step
        found: list[int] = []
        for position in range(first, first + self.per_step):
            epoch, place = divmod(position, self.sequences)
            found.append(_epoch_order(self.seed, epoch, self.sequences)[place])
        return found

    def epochs_after(self, step: int) -> float:
        """Return the epochs behind so many steps."""
        return step * self.per_step / self.sequences


@lru_cache(2)
def _epoch_order(seed: int, epoch: int, sequences: int) -> list[int]:
    order = list(range(sequences))
    random.Random(f"{seed}/imitation/{epoch}").shuffle(order)
    return order
