"""The schedule of the learning rate; no torch."""

import math

from services.learner.config.learner import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of step 1..total_steps: a linear rise over the warm-up, then the schedule.

    `linear` and `cosine` would reach 0 one step after the last, so that no step is wasted.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps - 1) / span)
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
