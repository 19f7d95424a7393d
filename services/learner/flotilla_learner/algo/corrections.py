"""Weights and masks of tokens that trainer and engine sample with different probabilities.

Everything here is a function of d = trainer - sampler, the difference of logprobs, without a
gradient. The trainer's logprobs are those of the parameters at the start of the step. A weight
multiplies the policy loss of a token; a mask removes all its terms.

A NaN difference is never masked: it must show in the loss, which is then refused.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla_learner.algo.sequences import sequence_means, sequence_sums
from flotilla_learner.config.algorithm import CorrectionConfig


@dataclass(frozen=True, slots=True)
class CorrectionInput:
    """Policy tokens [n]; whole sequences if `needs_sequences`."""

    trainer: Tensor
    behaviour: Tensor
    # int64: index of the token's sequence, below `count`.
    sequence: Tensor
    count: int
    # Versions by which the sequence's policy lagged.
    staleness: Tensor


@dataclass(frozen=True, slots=True)
class Correction:
    """Factor of each token's policy loss [n], and the mask of kept tokens [n] (bool)."""

    weights: Tensor
    kept: Tensor


def needs_sequences(config: CorrectionConfig) -> bool:
    """Return True if a token's weight or mask depends on other tokens of its sequence."""
    chosen = (config.sequence_tis, config.sequence_mask_product, config.sequence_mask_geometric)
    return any(value is not None for value in chosen)


def needs_trainer_logprobs(config: CorrectionConfig, ratio_limit: float | None) -> bool:
    """Return True if any correction depends on the trainer's logprobs."""
    per_token = (config.token_tis, config.token_mask, ratio_limit)
    return needs_sequences(config) or any(value is not None for value in per_token)


@torch.no_grad()
def compute_correction(
    tokens: CorrectionInput, config: CorrectionConfig, ratio_limit: float | None = None
) -> Correction:
    """Return weights and mask of the tokens.

    Truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561, section 4.1):
    min(exp d, token_tis), or min(exp(sum of d over the sequence), sequence_tis). Double-sided
    mask of IcePop, arXiv 2510.18855: a token counts if low <= exp d <= high. Sequence masks:
    the same for exp(sum of d) and for exp(mean of d). Staleness: times staleness_decay ** lag.
    `ratio_limit` x masks tokens outside [1 / x, x]."""
    difference = tokens.trainer - tokens.behaviour
    sums = sequence_sums(difference, tokens.sequence, tokens.count)[tokens.sequence]
    means = sequence_means(difference, tokens.sequence, tokens.count)[tokens.sequence]
    weights = config.staleness_decay ** tokens.staleness.to(difference.dtype)
    weights = weights * _truncated_ratio(difference, config.token_tis)
    weights = weights * _truncated_ratio(sums, config.sequence_tis)
    limit = (1 / ratio_limit, ratio_limit) if ratio_limit is not None else None
    kept = _within_bounds(difference, config.token_mask) & _within_bounds(difference, limit)
    kept &= _within_bounds(sums, config.sequence_mask_product)
    kept &= _within_bounds(means, config.sequence_mask_geometric)
    return Correction(weights, kept)


def _truncated_ratio(log_ratio: Tensor, cap: float | None) -> Tensor:
    """min(exp(log_ratio), cap), 1 without a cap; never overflows."""
    if cap is None:
        return torch.ones_like(log_ratio)
    return log_ratio.clamp(max=math.log(cap)).exp()


def _within_bounds(log_ratio: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """Mask [n]: low <= exp(log_ratio) <= high, or NaN; True everywhere without bounds."""
    if bounds is None:
        return torch.ones_like(log_ratio, dtype=torch.bool)
    low = math.log(bounds[0]) if bounds[0] > 0 else -math.inf
    outside = (log_ratio < low) | (log_ratio > math.log(bounds[1]))
    return ~outside
