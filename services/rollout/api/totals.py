"""What a rollout worker has done since it started."""

from collections import Counter
from dataclasses import dataclass, field

from services.rollout.types import FailureKind, Trajectory


@dataclass(slots=True)
class Totals:
    """`attempts` are the tries that ended; `stop_reasons` says of each why."""

    attempts: int = 0
    graded: int = 0
    failed: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    leases: int = 0
    lost_leases: int = 0
    stop_reasons: Counter[str] = field(default_factory=Counter[str])

    def count(self, trajectory: Trajectory) -> None:
        self.attempts += 1
        self.turns += trajectory.counts.turns
        self.sampled_tokens += sum(turn.generated_tokens for turn in trajectory.turns)
        self.graded += trajectory.graded
        self.failed += not trajectory.graded
        self.stop_reasons[trajectory.failure or trajectory.stop_reason or FailureKind.NO_GRADE] += 1
