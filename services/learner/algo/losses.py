"""Policy losses per token, as functions of the logprobs under the parameters being trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# exp() of a larger log-ratio says nothing but "far off" and overflows in what follows.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token [n], and where the clip took the gradient away [n] (bool)."""

    loss: Tensor
    clipped: Tensor


# (logprobs, behaviour logprobs, advantages), each [n], to the loss of each token.
PolicyLoss = Callable[[Tensor, Tensor, Tensor], TokenLoss]


def log_ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """log(pi / behaviour) of each token, held within +-20."""
    return (logprobs - behaviour).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def ppo_clip(clip_low: float, clip_high: float) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    PPO, arXiv 1707.06347, equation 7, with the wider upper bound of DAPO, arXiv 2503.14476,
    equation 10. The ratio is taken against the *behaviour* policy, the one that sampled the
    token, so that the clip also bounds what stale or mismatched samples can do.
    """

    def loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> TokenLoss:
        ratio = log_ratio(logprobs, behaviour).exp()
        plain = ratio * advantages
        bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
        return TokenLoss(-torch.minimum(plain, bounded), bounded < plain)

    return loss


# Each takes (clip_low, clip_high).
LOSSES: Mapping[str, Callable[[float, float], PolicyLoss]] = {"ppo_clip": ppo_clip}
