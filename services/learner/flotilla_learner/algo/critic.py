"""Loss of the value model."""

import torch
from torch import Tensor

from flotilla_learner.algo.losses import TokenLoss


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> TokenLoss:
    """max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2 of each token [n].

    The value clipping of PPO's own implementation, absent from its paper; described in
    arXiv 2005.12729. `old` are the values before the step, `returns` are `critic_targets`.
    """
    held = torch.clamp(values, old - clip, old + clip)
    plain, bounded = (values - returns).square(), (held - returns).square()
    return TokenLoss(torch.maximum(plain, bounded) / 2, bounded > plain)
