"""Scores a batch with every model that the algorithm needs, before a step's first update.

Every rank does the same here and gets the same result: advantages, weights and mini-batches never
depend on the distribution of work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flotilla_learner.algo.objective import Objective
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.rank.critic import Critic
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.reference import ReferencePolicy
from flotilla_learner.rank.rows import ByRow, Row
from flotilla_learner.rank.scoring import predict_row_values, score_rows
from flotilla_learner.rank.step_examples import (
    ModelScores,
    PreparedBatch,
    find_targets,
    make_examples,
    rows_of,
)
from flotilla_learner.types import TrainBatch


class NotFiniteError(Exception):
    """A training target is NaN or infinite; the message names it."""


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
        rows = rows_of(batch)
        scored = ModelScores()
        if self._kl_in_reward:
            scored.proximal, scored.reference = (
                self._proximal_logprobs(rows),
                self._reference_logprobs(rows),
            )
        if self.critic is not None:
            values = predict_row_values(self.critic, rows, self.packer)
            scored.values = _require_finite(values, "the critic's values")
        everywhere = objective.moves_without_advantage
        targets = find_targets(batch, rows, scored, self.algorithm, everywhere=everywhere)
        if objective.needs_reference_logprobs and not scored.reference:
            scored.reference = self._reference_logprobs(targets.chosen)
        if objective.needs_proximal_logprobs and not scored.proximal:
            # A choice of tokens looks at those without a gradient, too.
            chosen = targets.kept if objective.chooses_tokens else targets.chosen
            scored.proximal = self._proximal_logprobs(chosen)
        return make_examples(batch, targets, scored, self.algorithm, self.norm_tokens)

    @property
    def _kl_in_reward(self) -> bool:
        return self.algorithm.kl.needs_reference and self.algorithm.kl.place == "reward"

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
