"""One training step: advantages, packs, fused loss, optimizer updates, metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.learner.algo.advantages import ESTIMATORS, group_advantages
from services.learner.algo.logprob_head import fused_policy_loss
from services.learner.algo.losses import LOSSES, LossInput
from services.learner.algo.masks import predicting_positions, within_ratio
from services.learner.algo.mismatch import Mismatch, measure
from services.learner.algo.packing import first_fit_decreasing
from services.learner.algo.reductions import REDUCTIONS
from services.learner.algorithm_config import AlgorithmConfig
from services.learner.rank.config import RankConfig
from services.learner.rank.model import Policy
from services.learner.rank.optimizer import Optimizer, Update
from services.learner.types import TrainBatch, TrainSequence


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence as it enters a pack, up to its last policy token."""

    token_ids: NDArray[np.int32]
    # Positions whose next token the policy wrote.
    positions: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    temperature: float
    advantage: float
    # Of each policy token in the loss.
    weight: float


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over the policy tokens that were trained on."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    mismatch: Mismatch = field(default_factory=Mismatch)

    def __add__(self, other: "_Totals") -> "_Totals":
        return _Totals(
            self.loss + other.loss,
            self.entropy + other.entropy,
            self.clipped + other.clipped,
            self.mismatch + other.mismatch,
        )


def split_groups(sequences: Sequence[TrainSequence], parts: int) -> list[tuple[TrainSequence, ...]]:
    """At most `parts` mini-batches of whole groups, in the batch's order, as even as can be."""
    groups: dict[str, list[TrainSequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.group_id, []).append(sequence)
    bounds = np.linspace(0, len(groups), min(parts, max(1, len(groups))) + 1).astype(int)
    ordered = list(groups.values())
    return [
        tuple(sequence for group in ordered[start:end] for sequence in group)
        for start, end in pairwise(bounds)
    ]


class Trainer:
    """Makes the optimizer updates of a step. Deterministic given parameters, state and batch."""

    def __init__(
        self, policy: Policy, optimizer: Optimizer, algorithm: AlgorithmConfig, rank: RankConfig
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._rank = rank
        self._loss = LOSSES.get(algorithm.loss)

    def train(self, batch: TrainBatch, lr: float) -> tuple[dict[str, float], bool]:
        """The step's metrics, and whether any of its updates was refused.

        Groups without a signal take part in the normalisation and are not computed: their
        gradient is 0. A mini-batch of nothing else makes no update.
        """
        rows = self._rows(batch.sequences)
        totals = _Totals()
        updates: list[Update] = []
        for epoch in range(self._algorithm.epochs):
            for part in rows:
                seen = self._accumulate(part)
                if seen.mismatch.tokens == 0:
                    continue
                updates.append(self._update(seen, lr))
                totals += seen if epoch == 0 else _Totals()
        return _metrics(totals, updates, lr, len(rows)), any(u.skipped for u in updates)

    def _update(self, seen: _Totals, lr: float) -> Update:
        """A clamp passes no gradient for NaN, so the loss is looked at as well as the norm."""
        if not math.isfinite(seen.loss):
            return self._optimizer.discard()
        return self._optimizer.step(lr)

    def _rows(self, sequences: Sequence[TrainSequence]) -> list[list[_Row]]:
        """The rows that carry a gradient, by mini-batch."""
        advantages = group_advantages(
            [s.group_id for s in sequences],
            [s.attempt_index for s in sequences],
            [s.reward for s in sequences],
            ESTIMATORS[self._algorithm.advantage],
        )
        by_id = {id(s): a for s, a in zip(sequences, advantages.tolist(), strict=True)}
        reduce = REDUCTIONS[self._algorithm.reduction]
        mini_batches: list[list[_Row]] = []
        for part in split_groups(sequences, self._algorithm.mini_batches):
            weights = reduce([int(s.policy_mask.sum()) for s in part], 1)
            pairs = zip(part, weights.tolist(), strict=True)
            rows = [_row(s, by_id[id(s)], weight) for s, weight in pairs]
            mini_batches.append([r for r in rows if r.advantage and len(r.positions)])
        return mini_batches

    def _accumulate(self, rows: Sequence[_Row]) -> _Totals:
        """Adds the gradient of all rows' loss to the parameters, a pack at a time."""
        budget = self._rank.pack_tokens if self._policy.packable else 1
        packs = first_fit_decreasing([len(row.token_ids) for row in rows], budget)
        totals = _Totals()
        for pack in packs:
            totals += self._backward([rows[index] for index in pack])
        return totals

    def _backward(self, rows: Sequence[_Row]) -> _Totals:
        tokens = _PackTokens.of(rows, self._policy.device)
        hidden = self._policy.hidden([row.token_ids for row in rows])[tokens.positions]
        clipped = torch.zeros_like(tokens.targets, dtype=torch.bool)
        kept = torch.zeros_like(clipped)

        def objective(logprobs: Tensor, span: slice) -> Tensor:
            behaviour = tokens.behaviour[span]
            result = self._loss(
                LossInput(logprobs, behaviour, tokens.advantages[span], tokens.targets[span], 0),
                self._algorithm,
            )
            kept[span] = within_ratio(
                logprobs.detach(), behaviour, self._algorithm.correction.token_mask
            )
            clipped[span] = result.clipped
            return torch.where(kept[span], result.loss, 0.0) * tokens.weights[span]

        loss, logprobs, entropy = fused_policy_loss(
            hidden,
            self._policy.head,
            tokens.targets,
            tokens.temperature,
            objective,
            chunk=self._rank.head_chunk,
        )
        loss.backward()
        return _Totals(
            float(loss.detach()),
            float(entropy.double().sum()),
            int(torch.count_nonzero(clipped)),
            measure(logprobs, tokens.behaviour, kept),
        )


@dataclass(frozen=True, slots=True)
class _PackTokens:
    """The policy tokens of a pack; every tensor is [policy tokens]."""

    positions: Tensor
    targets: Tensor
    behaviour: Tensor
    temperature: Tensor
    advantages: Tensor
    weights: Tensor

    @staticmethod
    def of(rows: Sequence[_Row], device: torch.device) -> "_PackTokens":
        starts = np.cumsum([0, *(len(row.token_ids) for row in rows)])
        counts = [len(row.positions) for row in rows]

        def spread(values: list[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), counts)).to(device)

        positions = np.concatenate(
            [row.positions + start for row, start in zip(rows, starts, strict=False)]
        )
        targets = np.concatenate([row.token_ids[row.positions + 1] for row in rows])
        behaviour = np.concatenate([row.behaviour for row in rows])
        return _PackTokens(
            torch.from_numpy(positions).to(device),
            torch.from_numpy(targets.astype(np.int64)).to(device),
            torch.from_numpy(behaviour).to(device),
            spread([row.temperature for row in rows]),
            spread([row.advantage for row in rows]),
            spread([row.weight for row in rows]),
        )


def _row(sequence: TrainSequence, advantage: float, weight: float) -> _Row:
    positions = predicting_positions(sequence.policy_mask)
    # What follows the last policy token is trained on by nobody.
    end = int(positions[-1]) + 2 if len(positions) else 0
    return _Row(
        sequence.token_ids[:end],
        positions,
        sequence.behaviour_logprobs[sequence.policy_mask].astype(np.float32, copy=False),
        sequence.temperature,
        advantage,
        weight,
    )


def _metrics(
    totals: _Totals, updates: Sequence[Update], lr: float, mini_batches: int
) -> dict[str, float]:
    """`policy/loss` is the mean over mini-batches; the rest are means over trained tokens."""
    tokens = max(1, totals.mismatch.tokens)
    norms = [update.grad_norm for update in updates]
    return {
        "policy/loss": totals.loss / max(1, mini_batches),
        "policy/entropy": totals.entropy / tokens,
        "policy/grad_norm": float(np.mean(norms)) if norms else 0.0,
        "policy/clip_ratio": totals.clipped / tokens,
        "policy/lr": lr,
        "policy/updates": float(sum(not update.skipped for update in updates)),
        **totals.mismatch.metrics(),
    }
