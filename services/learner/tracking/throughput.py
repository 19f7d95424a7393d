"""Rates and ratios over the newest steps.

Rollout and training overlap: most of a step's data was received during the previous step, and the
amount that arrives between the ends of two steps fluctuates. Over several steps it evens out."""

from collections import deque
from statistics import median

from services.learner.groups.counters import StepCounters
from services.learner.tracking.metric_formulas import StepTimes

# Number of steps in the window.
WINDOW = 8


class ThroughputWindow:
    """Newest steps of this start, at most `WINDOW`."""

    def __init__(self) -> None:
        self._steps: deque[tuple[StepTimes, StepCounters]] = deque(maxlen=WINDOW)

    def add_step(self, times: StepTimes, counters: StepCounters) -> dict[str, float]:
        """Add a step, with the counts since the previous one; return the window's figures:

        - throughput/tokens_per_sec_gen: sum of policy tokens received / sum of step seconds,
          evaluations included in both
        - throughput/trajectories_per_sec: sum of tries received / sum of step seconds
        - timing/overlap_ratio: median step / max(median rollout, median train), in seconds; 1
          if the shorter hides behind the longer, up to 2 if they take turns. A rollout lasts
          from the first lease of a step's groups to the end of the last, so below 1 if the
          groups of a step are sampled during several"""
        self._steps.append((times, counters))
        seconds = max(sum(step.step for step, _ in self._steps), 1e-9)
        figures = {
            "throughput/tokens_per_sec_gen": sum(c.policy_tokens for _, c in self._steps) / seconds,
            "throughput/trajectories_per_sec": sum(c.trajectories for _, c in self._steps)
            / seconds,
        }
        rollout = median(step.rollout for step, _ in self._steps)
        train = median(step.train for step, _ in self._steps)
        if max(rollout, train) > 0:
            whole = median(step.step for step, _ in self._steps)
            figures["timing/overlap_ratio"] = whole / max(rollout, train)
        return figures
