"""Examples of a step's updates, decided on the whole batch before the first update.

Every rank does the same here and gets the same result: advantages, weights and mini-batches never
depend on the distribution of work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.learner.algo.advantages import ADVANTAGES, BatchRewards, critic_targets
from services.learner.algo.kl import kl_rewards
from services.learner.algo.objective import Objective
from services.learner.algo.overlong import not_overlong_mask, soft_penalties
from services.learner.algo.reductions import REDUCTIONS
from services.learner.config.algorithm import AlgorithmConfig
from services.learner.rank.critic import Critic
from services.learner.rank.model import Policy
from services.learner.rank.packed_rows import ByRow, Row, RowPacker, split_groups
from services.learner.rank.reference import ReferencePolicy
from services.learner.rank.scoring import predict_row_values, score_rows
from services.learner.types import TrainBatch

Values = NDArray[np.float64]


class NotFiniteError(Exception):
    """A training target is NaN or infinite; the message names it."""


@dataclass(frozen=True, slots=True)
class TrainExample:
    """A row and its training targets; every array is [policy tokens]."""

    row: Row
    advantages: Values
    # True if it has a gradient for the policy.
    moves: bool
    # Weight of each of its tokens in the losses.
    weight: float = 0.0
    # Logprobs of the policy at the start of the step, and of the reference.
    proximal: NDArray[np.float32] | None = None
    reference: NDArray[np.float32] | None = None
    # The critic's values before the step, and their targets.
    values: NDArray[np.float32] | None = None
    returns: Values | None = None


@dataclass(slots=True)
class _ModelScores:
    """Scores of rows by each model, by place in the batch; empty if not needed."""

    proximal: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    reference: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    values: ByRow = field(default_factory=dict[int, NDArray[np.float32]])


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch, ready for its updates."""

    # Trained examples by mini-batch: whole groups, in batch order.
    mini_batches: list[list[TrainExample]]
    # For every sequence of the batch.
    advantages: list[Values]

    @property
    def examples(self) -> list[TrainExample]:
        return [example for part in self.mini_batches for example in part]


@dataclass(frozen=True, slots=True)
class BatchPreparer:
    """Scores a batch with every model that the algorithm needs, and makes examples of it."""

    policy: Policy
    reference: ReferencePolicy | None
    critic: Critic | None
    algorithm: AlgorithmConfig
    packer: RowPacker
    # Policy tokens whose logits exist at the same time.
    chunk: int
    # Constant of the reduction sequence_mean_token_sum_norm.
    norm_tokens: int

    def prepare_batch(self, batch: TrainBatch, objective: Objective) -> PreparedBatch:
        """Score the batch and return its examples in mini-batches.

        Raises NotFiniteError, and ValueError for rewards that cannot be compared."""
        rows = [
            Row.from_sequence(index, sequence) for index, sequence in enumerate(batch.sequences)
        ]
        scored = _ModelScores()
        if self._kl_in_reward:
            scored.proximal, scored.reference = (
                self._proximal_logprobs(rows),
                self._reference_logprobs(rows),
            )
        if self.critic is not None:
            values = predict_row_values(self.critic, rows, self.packer)
            scored.values = _require_finite(values, "the critic's values")
        rewards = self._batch_rewards(batch, rows, scored)
        advantages = ADVANTAGES.get(self.algorithm.advantage)(rewards, self.algorithm)
        returns = critic_targets(rewards, self.algorithm) if self.critic is not None else None
        kept = [row for row, keep in zip(rows, self._not_overlong(batch), strict=True) if keep]
        everywhere = objective.moves_without_advantage
        moving = {row.index for row in kept if everywhere or np.any(advantages[row.index])}
        chosen = [row for row in kept if row.index in moving]
        if objective.needs_reference_logprobs and not scored.reference:
            scored.reference = self._reference_logprobs(chosen)
        if objective.needs_proximal_logprobs and not scored.proximal:
            scored.proximal = self._proximal_logprobs(chosen)
        examples = {
            row.index: _make_example(row, advantages, row.index in moving, scored, returns)
            for row in kept
            if len(row.positions)
        }
        return PreparedBatch(self._mini_batches(batch, examples), advantages)

    @property
    def _kl_in_reward(self) -> bool:
        return self.algorithm.kl.needs_reference and self.algorithm.kl.place == "reward"

    def _batch_rewards(
        self, batch: TrainBatch, rows: Sequence[Row], scored: _ModelScores
    ) -> BatchRewards:
        """Return the batch's rewards, minus penalties for length and for leaving the reference."""
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

    def _not_overlong(self, batch: TrainBatch) -> NDArray[np.bool_]:
        sequences = batch.sequences
        return not_overlong_mask(
            [s.stop_reason for s in sequences],
            [len(s.token_ids) for s in sequences],
            self.algorithm.overlong,
        )

    def _mini_batches(
        self, batch: TrainBatch, examples: Mapping[int, TrainExample]
    ) -> list[list[TrainExample]]:
        """Return the examples by mini-batch, weighted within it; the others count for nothing."""
        reduce = REDUCTIONS[self.algorithm.reduction]
        groups = [sequence.group_id for sequence in batch.sequences]
        counts = [
            len(examples[i].row.positions) if i in examples else 0 for i in range(len(groups))
        ]
        found: list[list[TrainExample]] = []
        for part in split_groups(groups, self.algorithm.mini_batches):
            weights = reduce([counts[place] for place in part], self.norm_tokens)
            pairs = zip(part, weights.tolist(), strict=True)
            found.append([replace(examples[i], weight=w) for i, w in pairs if i in examples])
        return found

    def _proximal_logprobs(self, rows: Sequence[Row]) -> ByRow:
        scores = score_rows(self.policy, rows, self.packer, chunk=self.chunk)
        return _require_finite(scores, "the policy's logprobs")

    def _reference_logprobs(self, rows: Sequence[Row]) -> ByRow:
        if self.reference is None:
            raise ValueError("a KL penalty needs a reference policy")
        with self.reference.on_policy_device() as reference:
            scores = score_rows(reference, rows, self.packer, chunk=self.chunk)
        return _require_finite(scores, "the reference policy's logprobs")


def _require_finite(scores: ByRow, what: str) -> ByRow:
    if not all(np.isfinite(array).all() for array in scores.values()):
        raise NotFiniteError(f"{what} are not finite")
    return scores


def _make_example(
    row: Row,
    advantages: Sequence[Values],
    moves: bool,
    scored: _ModelScores,
    returns: Sequence[Values] | None,
) -> TrainExample:
    return TrainExample(
        row,
        advantages[row.index],
        moves,
        proximal=scored.proximal.get(row.index),
        reference=scored.reference.get(row.index),
        values=scored.values.get(row.index),
        returns=returns[row.index] if returns is not None else None,
    )
