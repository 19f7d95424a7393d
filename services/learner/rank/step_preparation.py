"""What a step's updates are made of, decided on the whole batch before the first of them.

Every rank does the same here and gets the same: advantages, weights and mini-batches never depend
on which rank computes what.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.learner.algo.advantages import ADVANTAGES, BatchRewards, critic_targets
from services.learner.algo.kl import kl_rewards
from services.learner.algo.objective import Objective
from services.learner.algo.overlong import overlong_kept, soft_penalties
from services.learner.algo.reductions import REDUCTIONS
from services.learner.config.algorithm import AlgorithmConfig
from services.learner.rank.critic import Critic
from services.learner.rank.model import Policy
from services.learner.rank.packed_rows import ByRow, Packer, Row, split_groups
from services.learner.rank.reference import Reference
from services.learner.rank.scoring import score_rows, value_rows
from services.learner.types import TrainBatch

Values = NDArray[np.float64]


class NotFiniteError(Exception):
    """What was to be trained against is NaN or infinite; the message says what."""


@dataclass(frozen=True, slots=True)
class Example:
    """A row, and what it is trained towards; every array is [policy tokens]."""

    row: Row
    advantages: Values
    # Whether it has a gradient for the policy.
    moves: bool
    # Of each of its tokens in the losses.
    weight: float = 0.0
    # Logprobs of the policy as the step begins, and of the reference.
    proximal: NDArray[np.float32] | None = None
    reference: NDArray[np.float32] | None = None
    # What the critic said before the step, and what it should have said.
    values: NDArray[np.float32] | None = None
    returns: Values | None = None


@dataclass(slots=True)
class _Scored:
    """What the models said of rows, by their place in the batch; empty where not asked."""

    proximal: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    reference: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    values: ByRow = field(default_factory=dict[int, NDArray[np.float32]])


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch, ready for its updates."""

    # Those that are trained on, by mini-batch: of whole groups, in the batch's order.
    mini_batches: list[list[Example]]
    # Of every sequence of the batch.
    advantages: list[Values]

    @property
    def examples(self) -> list[Example]:
        """Of all mini-batches."""
        return [example for part in self.mini_batches for example in part]


@dataclass(frozen=True, slots=True)
class Preparer:
    """Scores a batch with every model that the algorithm asks, and makes examples of it."""

    policy: Policy
    reference: Reference | None
    critic: Critic | None
    algorithm: AlgorithmConfig
    packer: Packer
    # Policy tokens whose logits exist at once.
    chunk: int
    # The constant of the reduction sequence_mean_token_sum_norm.
    norm_tokens: int

    def prepare(self, batch: TrainBatch, objective: Objective) -> Prepared:
        """Raises NotFiniteError, and ValueError for rewards that cannot be compared."""
        rows = [Row.of(index, sequence) for index, sequence in enumerate(batch.sequences)]
        scored = _Scored()
        if self._kl_in_reward:
            scored.proximal, scored.reference = self._proximal(rows), self._reference(rows)
        if self.critic is not None:
            values = value_rows(self.critic, rows, self.packer)
            scored.values = _checked(values, "the critic's values")
        rewards = self._rewards(batch, rows, scored)
        advantages = ADVANTAGES.get(self.algorithm.advantage)(rewards, self.algorithm)
        returns = critic_targets(rewards, self.algorithm) if self.critic is not None else None
        kept = [row for row, keep in zip(rows, self._kept(batch), strict=True) if keep]
        everywhere = objective.moves_without_advantage
        moving = {row.index for row in kept if everywhere or np.any(advantages[row.index])}
        chosen = [row for row in kept if row.index in moving]
        if objective.needs_reference and not scored.reference:
            scored.reference = self._reference(chosen)
        if objective.needs_proximal and not scored.proximal:
            scored.proximal = self._proximal(chosen)
        examples = {
            row.index: _example(row, advantages, row.index in moving, scored, returns)
            for row in kept
            if len(row.positions)
        }
        return Prepared(self._mini_batches(batch, examples), advantages)

    @property
    def _kl_in_reward(self) -> bool:
        return self.algorithm.kl.coefficient > 0 and self.algorithm.kl.place == "reward"

    def _rewards(self, batch: TrainBatch, rows: Sequence[Row], scored: _Scored) -> BatchRewards:
        """What the batch earned, less the penalties for length and for leaving the reference."""
        sequences = batch.sequences
        groups = [s.group_id for s in sequences]
        attempts = [s.attempt_index for s in sequences]
        counts = [len(row.positions) for row in rows]
        penalties = soft_penalties(groups, attempts, counts, self.algorithm.overlong)
        token_rewards = [np.zeros(count) for count in counts]
        for index, proximal in scored.proximal.items():
            policy, reference = (
                torch.from_numpy(logprobs).double()
                for logprobs in (proximal, scored.reference[index])
            )
            token_rewards[index] = kl_rewards(policy, reference, self.algorithm.kl).numpy()
        # A sequence without a policy token has no values.
        none = np.zeros(0, np.float32)
        values = [scored.values.get(row.index, none).astype(np.float64) for row in rows]
        earned = [s.reward + float(p) for s, p in zip(sequences, penalties, strict=True)]
        return BatchRewards(
            groups, attempts, earned, token_rewards, values if self.critic is not None else None
        )

    def _kept(self, batch: TrainBatch) -> NDArray[np.bool_]:
        sequences = batch.sequences
        return overlong_kept(
            [s.stop_reason for s in sequences],
            [len(s.token_ids) for s in sequences],
            self.algorithm.overlong,
        )

    def _mini_batches(
        self, batch: TrainBatch, examples: Mapping[int, Example]
    ) -> list[list[Example]]:
        """The examples by mini-batch, with their weights in it; the others count for nothing."""
        reduce = REDUCTIONS[self.algorithm.reduction]
        groups = [sequence.group_id for sequence in batch.sequences]
        counts = [
            len(examples[i].row.positions) if i in examples else 0 for i in range(len(groups))
        ]
        found: list[list[Example]] = []
        for part in split_groups(groups, self.algorithm.mini_batches):
            weights = reduce([counts[place] for place in part], self.norm_tokens)
            pairs = zip(part, weights.tolist(), strict=True)
            found.append([replace(examples[i], weight=w) for i, w in pairs if i in examples])
        return found

    def _proximal(self, rows: Sequence[Row]) -> ByRow:
        scores = score_rows(self.policy, rows, self.packer, chunk=self.chunk)
        return _checked(scores, "the policy's logprobs")

    def _reference(self, rows: Sequence[Row]) -> ByRow:
        if self.reference is None:
            raise ValueError("a KL penalty needs a reference policy")
        with self.reference.awake() as reference:
            scores = score_rows(reference, rows, self.packer, chunk=self.chunk)
        return _checked(scores, "the reference policy's logprobs")


def _checked(scores: ByRow, what: str) -> ByRow:
    if not all(np.isfinite(array).all() for array in scores.values()):
        raise NotFiniteError(f"{what} are not finite")
    return scores


def _example(
    row: Row,
    advantages: Sequence[Values],
    moves: bool,
    scored: _Scored,
    returns: Sequence[Values] | None,
) -> Example:
    return Example(
        row,
        advantages[row.index],
        moves,
        proximal=scored.proximal.get(row.index),
        reference=scored.reference.get(row.index),
        values=scored.values.get(row.index),
        returns=returns[row.index] if returns is not None else None,
    )
