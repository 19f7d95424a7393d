"""Totals of a rollout worker since its start."""

from collections import Counter
from dataclasses import dataclass, field

from flotilla_common.domain.trajectory import Trajectory


@dataclass(slots=True)
class WorkerTotals:
    """Totals of a worker: `attempts` counts ended tries, `stop_reasons` their reasons."""

    attempts: int = 0
    graded: int = 0
    failed: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    leases: int = 0
    lost_leases: int = 0
    stop_reasons: Counter[str] = field(default_factory=Counter[str])

    def count_trajectory(self, trajectory: Trajectory) -> None:
        self.attempts += 1
        self.turns += trajectory.counts.turns
        self.sampled_tokens += sum(turn.generated_tokens for turn in trajectory.turns)
        self.graded += trajectory.is_graded
        self.failed += not trajectory.is_graded
        self.stop_reasons[trajectory.end_reason] += 1
