"""Estimates of KL(policy || reference) from the sampled tokens; `reference` may be the sampler."""

import torch
from torch import Tensor

from flotilla_learner.algo.losses import log_ratio
from flotilla_learner.config.algorithm import KlConfig


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Return the estimate of each token [n], with its gradient with respect to `logprobs`.

    With d = logprobs - reference (joschu.net/blog/kl-approx.html):
    k1 = d, unbiased; k2 = d^2 / 2, whose gradient is that of the KL in expectation on policy;
    k3 = exp(-d) - 1 + d, unbiased and never negative, the one of GRPO (arXiv 2402.03300,
    equation 4), with |d| clamped to 20; abs = |d|.

    k1 as a term of the loss has a gradient of 0 in expectation: it belongs in the reward.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "abs":
        return difference.abs()
    if estimator == "k3":
        held = log_ratio(logprobs, reference)
        return torch.expm1(-held) + held
    raise ValueError(f"unknown KL estimator {estimator!r}: known are k1, k2, k3, abs")


@torch.no_grad()
def kl_rewards(logprobs: Tensor, reference: Tensor, config: KlConfig) -> Tensor:
    """Return the term added to each token's reward [n]: -coefficient * KL estimate.

    PPO with a KL in the reward, arXiv 2203.02155, equation 2; `logprobs` are the trainer's at the
    start of the step."""
    return -config.coefficient * kl_penalty(logprobs, reference, config.estimator)
