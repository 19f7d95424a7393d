"""Policy tokens of several sequences in float64, and the ways to cut them up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla_learner.algo.losses import LossInput
from flotilla_learner.algo.objective import Objective, PackTokens
from flotilla_learner.config.algorithm import AlgorithmConfig

Span = tuple[int, int]


def config(**keys: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


@dataclass(frozen=True)
class Sample:
    """Logprobs of one batch's tokens under four policies; every tensor is [n], float64."""

    lengths: tuple[int, ...]
    logprobs: Tensor
    behaviour: Tensor
    proximal: Tensor
    reference: Tensor
    # One for each sequence.
    sequence_advantages: Tensor
    sequence: Tensor

    @property
    def advantages(self) -> Tensor:
        return self.sequence_advantages[self.sequence]

    def loss_input(self, logprobs: Tensor, old: Tensor) -> LossInput:
        return LossInput(logprobs, old, self.advantages, self.sequence, len(self.lengths))

    def pack(
        self, places: Sequence[int], weights: Sequence[float], *, proximal: bool, reference: bool
    ) -> tuple[Tensor, PackTokens]:
        """The tokens of these sequences, in this order, and where they lie in the batch."""
        index = torch.cat([torch.nonzero(self.sequence == place)[:, 0] for place in places])
        counts = torch.tensor([self.lengths[place] for place in places])
        every = torch.tensor([weights[place] for place in places], dtype=torch.float64)
        tokens = PackTokens(
            behaviour=self.behaviour[index],
            advantages=self.advantages[index],
            weights=every.repeat_interleave(counts),
            sequence=torch.arange(len(places)).repeat_interleave(counts),
            count=len(places),
            staleness=self.sequence[index] % 3,
            proximal=self.proximal[index] if proximal else None,
            reference=self.reference[index] if reference else None,
        )
        return index, tokens


def sample(lengths: Sequence[int], *, seed: int = 0, noise: float = 0.4) -> Sample:
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    n = sum(lengths)
    logprobs = -2 + 0.5 * normal(n)
    return Sample(
        tuple(lengths),
        logprobs,
        logprobs + noise * normal(n),
        logprobs + noise * normal(n),
        logprobs + noise * normal(n),
        normal(len(lengths)),
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
    )


def loss_and_slope(
    drawn: Sample, chosen: AlgorithmConfig, weights: Sequence[float], packs: Sequence[Sequence[int]]
) -> tuple[float, Tensor]:
    """The batch's loss, summed over packs, and its gradient by every logprob."""
    objective = Objective(chosen)
    total, slope = 0.0, torch.zeros_like(drawn.logprobs)
    for places in packs:
        index, tokens = drawn.pack(
            places,
            weights,
            proximal=objective.needs_proximal_logprobs,
            reference=objective.needs_reference_logprobs,
        )
        leaf = drawn.logprobs[index].clone().requires_grad_()
        loss = objective.make_pack_loss(tokens)(leaf, slice(0, len(leaf))).sum()
        total += float(loss.detach())
        (slope[index],) = torch.autograd.grad(loss, leaf)
    return total, slope
