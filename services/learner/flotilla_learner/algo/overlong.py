"""Attempts that were cut off: masked, or penalised by length."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import StopReason
from flotilla_learner.config.algorithm import OverlongConfig


def not_overlong_mask(
    stop_reasons: Sequence[StopReason], lengths: Sequence[int], config: OverlongConfig
) -> NDArray[np.bool_]:
    """Return the mask of sequences that are trained on: overlong filtering of DAPO, arXiv
    2503.14476, section 3.4.

    `lengths` count all tokens of each sequence, including prompt and tool results. A masked
    sequence leaves the loss and its normalisation; its reward still counts in its group."""
    limit = config.mask_above_tokens
    return np.array(
        [
            reason not in config.mask_stop_reasons and (limit is None or length <= limit)
            for reason, length in zip(stop_reasons, lengths, strict=True)
        ],
        np.bool_,
    )


def soft_penalties(
    group_ids: Sequence[str],
    attempt_indices: Sequence[int],
    policy_tokens: Sequence[int],
    config: OverlongConfig,
) -> NDArray[np.float64]:
    """Return the term added to the reward of each sequence's attempt, equal for its sequences.

    soft_weight times DAPO, arXiv 2503.14476, equation 13, with n the policy tokens of the whole
    attempt: 0 up to soft_limit - soft_buffer, then (soft_limit - soft_buffer - n) / soft_buffer
    down to -1 at soft_limit, and -1 above."""
    if config.soft_limit is None:
        return np.zeros(len(group_ids))
    keys = list(zip(group_ids, attempt_indices, strict=True))
    totals: dict[tuple[str, int], int] = {}
    for key, tokens in zip(keys, policy_tokens, strict=True):
        totals[key] = totals.get(key, 0) + tokens
    lengths = np.array([totals[key] for key in keys], np.float64)
    free = config.soft_limit - config.soft_buffer
    return config.soft_weight * np.clip((free - lengths) / config.soft_buffer, -1.0, 0.0)
