"""Joint updates of policy and critic: both are made, or neither."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flotilla_learner.algo.objective import Objective
from flotilla_learner.rank.critic import Critic
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.gradient_accumulator import (
    GradientAccumulator,
    MiniBatchSums,
    RankTokenStats,
)
from flotilla_learner.rank.optimizer import Optimizer, OptimizerUpdate
from flotilla_learner.rank.rows import ByRow
from flotilla_learner.rank.step_examples import TrainExample

# The process's output is the rank's log.
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Update from one mini-batch, or the attempt at it."""

    # Sums over all ranks.
    sums: MiniBatchSums
    # None: nothing in the mini-batch had a gradient for the policy.
    policy: OptimizerUpdate | None
    critic: OptimizerUpdate | None

    @property
    def skipped(self) -> bool:
        """True if the update was refused because of a non-finite loss or gradient."""
        return any(update.skipped for update in (self.policy, self.critic) if update is not None)


@dataclass(slots=True)
class UpdateHistory:
    """A step's updates so far, and this rank's token statistics."""

    outcomes: list[UpdateOutcome] = field(default_factory=list[UpdateOutcome])
    # Number of them in the first epoch.
    first_epoch: int = 0
    # Logprobs of the rows that were computed before any update.
    logprobs: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    # Nats, in the first epoch.
    entropy: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    # Weights that corrections gave, 0 where they masked, in the first epoch.
    corrections: ByRow = field(default_factory=dict[int, NDArray[np.float32]])

    @property
    def policy_changed(self) -> bool:
        """True if the policy differs from the one at the step's start."""
        updates = [outcome.policy for outcome in self.outcomes]
        return any(not update.skipped for update in updates if update is not None)

    @property
    def made_outcomes(self) -> list[UpdateOutcome]:
        """Updates that were not refused."""
        return [outcome for outcome in self.outcomes if not outcome.skipped]

    @property
    def made_in_first_epoch(self) -> list[UpdateOutcome]:
        """Updates of the first epoch that were not refused."""
        return [outcome for outcome in self.outcomes[: self.first_epoch] if not outcome.skipped]

    def add_outcome(
        self, outcome: UpdateOutcome, seen: RankTokenStats, *, first_epoch: bool
    ) -> None:
        """Add an update's outcome, and its token statistics unless it was refused."""
        if first_epoch:
            self.first_epoch += 1
        if first_epoch and not outcome.skipped:
            self.entropy |= seen.entropy
            self.corrections |= seen.corrections
            if not self.policy_changed:
                self.logprobs |= seen.logprobs
        self.outcomes.append(outcome)


@dataclass(frozen=True, slots=True)
class JointUpdater:
    """Updates both models together, one mini-batch after another."""

    optimizer: Optimizer
    critic: Critic | None
    accumulator: GradientAccumulator
    replicas: Replicas

    def update_models(
        self, examples: Sequence[TrainExample], objective: Objective, lr: float, *, policy: bool
    ) -> tuple[UpdateOutcome, RankTokenStats] | None:
        """Update the critic and, with `policy`, the policy; return None if there is nothing to do.

        If anything about either is not finite, on any rank, neither is changed anywhere."""
        moving = [example for example in examples if example.moves] if policy else []
        if not moving and (self.critic is None or not examples):
            return None
        sums, seen = MiniBatchSums(), RankTokenStats()
        if moving:
            sums, seen = self.accumulator.add_policy_gradients(moving, objective)
        if self.critic is not None:
            sums += self.accumulator.add_critic_gradients(examples)
        sums = sums.sum_over_ranks(self.replicas)
        return UpdateOutcome(sums, *self._apply_updates(sums, lr, policy=bool(moving))), seen

    def _apply_updates(
        self, sums: MiniBatchSums, lr: float, *, policy: bool
    ) -> tuple[OptimizerUpdate | None, OptimizerUpdate | None]:
        """Apply the updates if losses and norms are finite: a clamp passes no gradient for NaN."""
        chosen = [(self.optimizer, lr)] if policy else []
        if self.critic is not None:
            chosen.append((self.critic.optimizer, self.critic.config.lr))
        for optimizer, _ in chosen:
            optimizer.all_reduce_gradients(self.replicas)
        norms = [optimizer.gradient_norm() for optimizer, _ in chosen]
        figures = (sums.loss, sums.value_loss, *(float(norm) for norm in norms))
        if all(math.isfinite(figure) for figure in figures):
            pairs = zip(chosen, norms, strict=True)
            updates = [optimizer.step(rate, norm) for (optimizer, rate), norm in pairs]
        else:
            _log.warning("an update is refused: of losses and gradient norms, %s", figures)
            updates = [optimizer.discard_gradients() for optimizer, _ in chosen]
        own = updates.pop(0) if policy else None
        return own, updates[0] if updates else None
