"""A mean over tasks that were attempted several times, with its interval. Pure.

Attempts at one task resemble one another: they are a cluster, and what counts is the number of
tasks, with each task's own estimate (its share of passes, or its pass@k)."""

import math
from collections.abc import Sequence
from statistics import fmean, variance

# The 97.5 % quantile of the normal distribution.
_Z = 1.959963984540054


def mean_interval(estimates: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of tasks' estimates, each from 0 to 1, for tasks of this
    kind, of which these are a sample. Raises ValueError if there are none.

    Wilson's score interval with the effective number of tasks, as for clustered surveys (Kott and
    Carr 1997; Franco, Little, Louis and Slud 2019): as many all-or-nothing tasks as would have the
    variance of this mean. To the observed variance of tasks counts half a task more, with the
    variance of an all-or-nothing one: a few tasks that are alike do not prove that all are.
    tests/common/domain/test_task_means.py measures how often it holds the truth."""
    mean = fmean(estimates)
    count = effective = float(len(estimates))
    if 0 < mean < 1:
        # Laplace's estimate, which is never 0 or 1.
        between = (count * mean + 1) * (count * (1 - mean) + 1) / (count + 2) ** 2
        observed = variance(estimates) if count > 1 else 0.0
        spread = ((count - 1) * observed + between / 2) / (count - 0.5)
        effective = count * mean * (1 - mean) / spread
    return wilson_interval(mean, effective)


def wilson_interval(fraction: float, count: float) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction of `count` (Wilson 1927)."""
    square = _Z * _Z / count
    centre = (fraction + square / 2) / (1 + square)
    half = _Z * math.sqrt(fraction * (1 - fraction) / count + square / (4 * count)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)
