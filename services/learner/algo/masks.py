"""Which tokens are trained on."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def predicting_positions(policy_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions whose next token the policy wrote; their hidden states give its logprobs.

    Raises ValueError when the policy wrote the first token, which nothing predicts.
    """
    positions = np.flatnonzero(policy_mask) - 1
    if len(positions) and positions[0] < 0:
        raise ValueError("the first token of a sequence must be a prompt's, the policy wrote it")
    return positions


def within_ratio(logprobs: Tensor, behaviour: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """True where pi / behaviour lies within `bounds`; everywhere when there are none.

    Tokens outside are samples that the trainer cannot explain. Masked importance sampling, as
    in IcePop, arXiv 2510.18855.
    """
    if bounds is None:
        return torch.ones_like(logprobs, dtype=torch.bool)
    low, high = torch.tensor(bounds, dtype=logprobs.dtype, device=logprobs.device).log()
    difference = logprobs - behaviour
    return (low <= difference) & (difference <= high)


def without_signal(group_ids: Sequence[str], rewards: Sequence[float]) -> NDArray[np.bool_]:
    """Which sequences belong to a group whose rewards are all equal, or that has one attempt.

    Zero-variance masking: an estimator within groups gives them advantage 0, so that leaving
    them out changes no gradient of the policy loss.
    """
    seen: dict[str, set[float]] = {}
    for group, reward in zip(group_ids, rewards, strict=True):
        seen.setdefault(group, set()).add(reward)
    return np.array([len(seen[group]) == 1 for group in group_ids], np.bool_)
