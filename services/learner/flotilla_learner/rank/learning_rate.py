"""The schedule of the learning rate; no torch."""

import math
from dataclasses import dataclass

from flotilla_learner.config.learner import OptimizerConfig


@dataclass(frozen=True, slots=True)
class WarmSteps:
    """Steps of a run's warm start; `lr` replaces the optimizer's rate in them if it is given."""

    count: int = 0
    lr: float | None = None


def learning_rate(
    config: OptimizerConfig, step: int, total_steps: int, warm: WarmSteps = WarmSteps()
) -> float:
    """Return the rate of step 1..total_steps: a linear rise over the warm-up, then the schedule.
    A warm start and the steps after it each have a whole course of their own.

    `linear` and `cosine` would reach 0 one step after the last, so that no step is wasted.
    """
    if step <= warm.count:
        own = config if warm.lr is None else config.model_copy(update={"lr": warm.lr})
        return _course_of(own, step, warm.count)
    return _course_of(config, step - warm.count, total_steps - warm.count)


def _course_of(config: OptimizerConfig, step: int, total_steps: int) -> float:
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps - 1) / span)
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
