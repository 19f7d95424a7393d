"""Tokens that a loss holds back, chosen among all tokens of an update before it is made. No torch.

A choice looks at the whole mini-batch, under the policy at the start of the step: so it depends
neither on packs nor on the number of ranks, and stays the same in every epoch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flotilla_learner.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class UpdateTokens:
    """Policy tokens of a mini-batch, groups without a signal included; arrays are [n], float64."""

    advantages: NDArray[np.float64]
    # Logprobs of the trainer at the start of the step, and of the reference point of the ratio.
    logprobs: NDArray[np.float64]
    old: NDArray[np.float64]


# Returns the mask of held tokens [n] (bool); the generator draws the same on every rank.
TokenChoice = Callable[[UpdateTokens, AlgorithmConfig, np.random.Generator], NDArray[np.bool_]]


def draw_covariant(
    tokens: UpdateTokens, config: AlgorithmConfig, draw: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw tokens among those whose covariance (A - mean A) * (logprob - mean logprob) lies within
    `clip_cov.low` and `clip_cov.high`, and that the clip does not hold already.

    Clip-Cov, arXiv 2505.22617: such tokens lower the policy's entropy most. The draw has
    `clip_cov.share` of all tokens, at least one, or all candidates if they are fewer."""
    chosen = np.zeros(len(tokens.advantages), np.bool_)
    if not len(chosen):
        return chosen
    bounds = config.clip_cov
    covariance = (tokens.advantages - tokens.advantages.mean()) * (
        tokens.logprobs - tokens.logprobs.mean()
    )
    # Compared as log-ratios, which never overflow.
    difference = tokens.logprobs - tokens.old
    with np.errstate(divide="ignore"):
        low, high = np.log([1 - config.clip_low, 1 + config.clip_high])
    clipped = (tokens.advantages > 0) & (difference > high)
    clipped |= (tokens.advantages < 0) & (difference < low)
    within = (bounds.low < covariance) & (covariance < bounds.high)
    candidates = np.flatnonzero(within & ~clipped)
    count = max(1, int(bounds.share * len(chosen)))
    chosen[draw.permutation(candidates)[:count]] = True
    return chosen
