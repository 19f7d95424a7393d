"""Losses of models that are trained at a caller's request, summed over targets that it names.

They have the names and formulas of Tinker's documentation: ratio = exp(logprobs - q), where q are
the logprobs under the policy that sampled, and nothing is averaged, or clamped besides what a
formula says. (The losses of a run are in `losses.py`.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla_learner.algo.losses import clipped_surrogate
from flotilla_learner.algo.sequences import sequence_sums


@dataclass(frozen=True, slots=True)
class TargetInputs:
    """Inputs of the targets of a pack, by name, each of the targets' shape: [n], or [n, k] with
    several targets at each position."""

    arrays: Mapping[str, Tensor]
    options: Mapping[str, float]
    # int64 [n]: index of the position's sequence, below `count`.
    sequence: Tensor
    count: int

    def part(self, span: slice) -> "TargetInputs":
        """Return the inputs of some of the positions."""
        arrays = {name: values[span] for name, values in self.arrays.items()}
        return TargetInputs(arrays, self.options, self.sequence[span], self.count)


# Maps (logprobs, their inputs) to each target's loss, in their shape.
SummedLoss = Callable[[Tensor, TargetInputs], Tensor]


def cross_entropy(logprobs: Tensor, given: TargetInputs) -> Tensor:
    """-weight * logprob; weights may have any sign."""
    return -logprobs * given.arrays["weights"]


def importance_sampling(logprobs: Tensor, given: TargetInputs) -> Tensor:
    """-ratio * A."""
    return -_ratio(logprobs, given) * _advantages(given)


def ppo(logprobs: Tensor, given: TargetInputs) -> Tensor:
    """-min(ratio * A, clip(ratio, low, high) * A)."""
    low, high = _thresholds(given)
    return clipped_surrogate(_ratio(logprobs, given), _advantages(given), low, high).loss


def cispo(logprobs: Tensor, given: TargetInputs) -> Tensor:
    """-sg[clip(ratio, low, high)] * A * logprob."""
    low, high = _thresholds(given)
    weight = _ratio(logprobs, given).detach().clamp(low, high)
    return -weight * _advantages(given) * logprobs


def dro(logprobs: Tensor, given: TargetInputs) -> Tensor:
    """-(A * logprob - beta / 2 * (logprob - q)^2)."""
    distance = (logprobs - given.arrays["logprobs"]) ** 2
    plain = logprobs * given.arrays["advantages"] - 0.5 * given.options["beta"] * distance
    return -plain * given.arrays["mask"] if "mask" in given.arrays else -plain


def gspo(logprobs: Tensor, given: TargetInputs) -> Tensor:
    """ppo with one ratio for a sequence, exp(mean of logprobs - q over its masked tokens).

    GSPO, arXiv 2507.18071, equations 5 and 7, summed over tokens. `sequence_ratio_mask` weighs
    the tokens of the mean."""
    counted = given.arrays["sequence_ratio_mask"]
    differences = torch.where(counted != 0, logprobs - given.arrays["logprobs"], 0) * counted
    sums = sequence_sums(differences, given.sequence, given.count)
    weights = sequence_sums(counted, given.sequence, given.count)
    # A sequence without a masked token has the ratio 1.
    means = sums / torch.where(weights == 0, 1, weights)
    low, high = _thresholds(given)
    ratio = means.exp()[given.sequence]
    return clipped_surrogate(ratio, _advantages(given), low, high).loss


SUMMED_LOSSES: Mapping[str, SummedLoss] = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)
}
# Those in which a token's loss depends on the logprobs of its whole sequence.
COUPLED = frozenset({"gspo"})


def _advantages(given: TargetInputs) -> Tensor:
    """Return the advantages, 0 where a mask says so."""
    advantages = given.arrays["advantages"]
    return advantages * given.arrays["mask"] if "mask" in given.arrays else advantages


def _ratio(logprobs: Tensor, given: TargetInputs) -> Tensor:
    """Return the ratio of each target; 1 without an advantage, so that what callers put there as q
    never makes 0 times infinity."""
    counts = _advantages(given) != 0
    return torch.where(counts, logprobs - given.arrays["logprobs"], 0).exp()


def _thresholds(given: TargetInputs) -> tuple[float, float]:
    return given.options["clip_low_threshold"], given.options["clip_high_threshold"]
