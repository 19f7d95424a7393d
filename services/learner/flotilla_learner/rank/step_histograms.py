"""Histograms of the values behind a step's means, in bins that are the same at every step."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flotilla_learner.types import Histogram

# |difference of logprobs|, and nats: from exactly equal over rounding errors to hopeless.
MAGNITUDES = (0.0, *np.logspace(-7, 1.5, 35).tolist())
# Importance ratios: 1 in the middle, factors of the square root of 2.
RATIOS = tuple(np.exp2(np.arange(-10.0, 10.5, 0.5)).tolist())
ADVANTAGES = tuple(np.linspace(-5.0, 5.0, 41).tolist())
# Tokens: 0, 1, then factors of the square root of 2, up to a million.
LENGTHS = (0.0, *np.exp2(np.arange(0.0, 20.5, 0.5)).tolist())


def bin_values(values: Sequence[ArrayLike], edges: Sequence[float]) -> Histogram:
    """Count all values in the bins between `edges`; those outside count in the first or last bin.

    Non-finite values are left out."""
    found: NDArray[np.float64] = np.concatenate(
        [np.zeros(0), *(np.atleast_1d(np.asarray(part, np.float64)) for part in values)]
    )
    held = np.clip(found[np.isfinite(found)], edges[0], edges[-1])
    counts, _ = np.histogram(held, np.asarray(edges, np.float64))
    return Histogram(tuple(edges), tuple(counts.tolist()))
