"""Divergences between the policy and a teacher at the tokens that the policy sampled.

On-policy distillation (arXiv 2306.13649, with its lambda = 1): the states are the policy's own, so
that the teacher corrects what the policy does, not what it would do itself."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla_learner.config.algorithm import DistillationConfig

# Least probability of all tokens beside the likeliest: float32 rounds their sum up to 1.
_LEAST_TAIL = 1e-7


def reverse_kl_advantages(
    teacher: NDArray[np.floating], sampler: NDArray[np.floating], weight: float
) -> NDArray[np.float64]:
    """Return what the teacher adds to each policy token's advantage, [n]:
    weight * (log teacher - log sampler).

    -KL(policy || teacher) estimated by the sampled token alone, as in the policy gradient of
    arXiv 2306.13649, section 3, without a discount: a token answers for itself, not for those after
    it. `sampler` are the logprobs that it was sampled with; the loss's ratio, clip and corrections
    treat the sum as any other advantage."""
    return weight * (teacher.astype(np.float64) - sampler.astype(np.float64))


def token_divergence(policy: Tensor, teacher: Tensor, config: DistillationConfig) -> Tensor:
    """Return the divergence of the next token's distributions at each position, [n], with its
    gradient by `policy`.

    Both are logprobs [n, k] of the same k tokens, the teacher's likeliest; all other tokens are one
    more outcome, whose probability is what is left. This is a lower bound of the divergence over
    the whole vocabulary, and 0 where both agree on the k tokens.

    - forward_kl: KL(teacher || policy)
    - reverse_kl: KL(policy || teacher)
    - jsd: beta KL(teacher || m) + (1 - beta) KL(policy || m), m = beta teacher + (1 - beta) policy,
      equation 1 of arXiv 2306.13649"""
    own, its = _with_tail(policy), _with_tail(teacher.to(policy.dtype))
    if config.divergence == "forward_kl":
        return _kl(its, own)
    if config.divergence == "reverse_kl":
        return _kl(own, its)
    beta = config.beta
    shares = torch.tensor([beta, 1 - beta], dtype=own.dtype, device=own.device).log()
    mixture = torch.logaddexp(its + shares[0], own + shares[1])
    return beta * _kl(its, mixture) + (1 - beta) * _kl(own, mixture)


def _with_tail(logprobs: Tensor) -> Tensor:
    """Append the logprob of all other tokens to those of the likeliest, [n, k + 1]."""
    most = torch.logsumexp(logprobs, -1, keepdim=True).clamp(max=-_LEAST_TAIL)
    return torch.cat([logprobs, torch.log(-torch.expm1(most))], -1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)
