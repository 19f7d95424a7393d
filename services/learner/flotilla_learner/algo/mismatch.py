"""Mismatch between the trainer's policy and the one that sampled the tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla_learner.algo.losses import log_ratio
from flotilla_learner.types import VersionMismatch

_TAIL = 0.999


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens, and the largest ratio."""

    tokens: int = 0
    abs_diff: float = 0.0
    kl: float = 0.0
    max_ratio: float = 0.0

    def to_metrics(self) -> dict[str, float]:
        """The `mismatch/*` metrics; empty without tokens."""
        if self.tokens == 0:
            return {}
        return {
            "mismatch/logprob_abs_diff_mean": self.abs_diff / self.tokens,
            "mismatch/kl_train_infer": self.kl / self.tokens,
            "mismatch/is_ratio_max": self.max_ratio,
        }


def measure_mismatch(logprobs: Tensor, behaviour: Tensor) -> Mismatch:
    """Compare the trainer's logprobs with the sampler's, both [n].

    `kl` is the k3 estimator of KL(behaviour || trainer), r - 1 - log r with r the ratio
    trainer / behaviour: unbiased on the sampler's tokens and never negative
    (joschu.net/blog/kl-approx.html)."""
    if logprobs.numel() == 0:
        return Mismatch()
    delta = log_ratio(logprobs.double(), behaviour.double())
    ratio = delta.exp()
    return Mismatch(
        tokens=logprobs.numel(),
        abs_diff=float(delta.abs().sum()),
        kl=float((ratio - 1 - delta).sum()),
        max_ratio=float(ratio.max()),
    )


def measure_version_mismatch(logprobs: Tensor, behaviour: Tensor) -> VersionMismatch:
    """Measure the mismatch of all tokens of one version, with the spread of the differences.

    Both [n], n at least 1. A non-finite logprob on either side makes every figure infinite: it
    agrees with nothing."""
    difference = logprobs.double() - behaviour.double()
    if not bool(torch.isfinite(difference).all()):
        worst = float("inf")
        return VersionMismatch(logprobs.numel(), worst, worst, worst, worst)
    delta = log_ratio(logprobs.double(), behaviour.double())
    size = difference.abs()
    return VersionMismatch(
        tokens=size.numel(),
        kl=float((delta.exp() - 1 - delta).mean()),
        abs_diff=float(size.mean()),
        abs_diff_tail=_exact_quantile(size, _TAIL),
        abs_diff_max=float(size.max()),
    )


def _exact_quantile(values: Tensor, q: float) -> float:
    """Return the smallest value that a share `q` of all values does not exceed.

    torch.quantile refuses more than 16 million values.
    """
    return float(values.sort().values[math.ceil(q * values.numel()) - 1])
