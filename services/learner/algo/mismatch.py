"""How far the trainer's policy is from the one that sampled the tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.learner.algo.losses import log_ratio


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens, so that micro-batches add up exactly."""

    tokens: int = 0
    abs_diff: float = 0.0
    kl: float = 0.0
    max_ratio: float = 0.0
    masked: int = 0

    def __add__(self, other: "Mismatch") -> "Mismatch":
        return Mismatch(
            self.tokens + other.tokens,
            self.abs_diff + other.abs_diff,
            self.kl + other.kl,
            max(self.max_ratio, other.max_ratio),
            self.masked + other.masked,
        )

    def metrics(self) -> dict[str, float]:
        """The `mismatch/*` metrics; empty when no token was seen."""
        if self.tokens == 0:
            return {}
        return {
            "mismatch/logprob_abs_diff_mean": self.abs_diff / self.tokens,
            "mismatch/kl_train_infer": self.kl / self.tokens,
            "mismatch/is_ratio_max": self.max_ratio,
            "mismatch/masked_fraction": self.masked / self.tokens,
        }


def measure(logprobs: Tensor, behaviour: Tensor, kept: Tensor) -> Mismatch:
    """Compares the trainer's logprobs with the sampler's, both [n]; `kept` [n] is the mask.

    `kl` is the k3 estimator of KL(behaviour || trainer), r - 1 - log r with r the ratio
    trainer / behaviour: unbiased on the sampler's tokens and never negative
    (joschu.net/blog/kl-approx.html).
    """
    if logprobs.numel() == 0:
        return Mismatch()
    delta = log_ratio(logprobs.double(), behaviour.double())
    ratio = delta.exp()
    return Mismatch(
        tokens=logprobs.numel(),
        abs_diff=float(delta.abs().sum()),
        kl=float((ratio - 1 - delta).sum()),
        max_ratio=float(ratio.max()),
        masked=int(torch.count_nonzero(~kept)),
    )
