"""Updates of policy and critic, which are made both or not at all."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.learner.algo.objective import Objective
from services.learner.rank.critic import Critic
from services.learner.rank.data_parallel import Replicas
from services.learner.rank.gradients import Accumulator, Seen, Sums
from services.learner.rank.optimizer import Optimizer, Update
from services.learner.rank.packed_rows import ByRow
from services.learner.rank.step_preparation import Example

# The rank's log is what its process prints.
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One mini-batch's update, or the attempt at it."""

    # On all ranks.
    sums: Sums
    # None: nothing of the mini-batch had a gradient for it.
    policy: Update | None
    critic: Update | None

    @property
    def skipped(self) -> bool:
        """Whether it was refused for a loss or gradient that is not finite."""
        return any(update.skipped for update in (self.policy, self.critic) if update is not None)


@dataclass(slots=True)
class History:
    """A step's updates so far, and what this rank saw on the way."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    # How many of them are of the first epoch.
    first_epoch: int = 0
    # Logprobs of the rows that came before any update was made.
    logprobs: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    # Nats, in the first epoch.
    entropy: ByRow = field(default_factory=dict[int, NDArray[np.float32]])

    @property
    def changed(self) -> bool:
        """Whether the policy is another than at the step's start."""
        updates = [outcome.policy for outcome in self.outcomes]
        return any(not update.skipped for update in updates if update is not None)

    @property
    def made(self) -> list[Outcome]:
        """Those that were not refused."""
        return [outcome for outcome in self.outcomes if not outcome.skipped]

    @property
    def made_first(self) -> list[Outcome]:
        """Those of the first epoch that were not refused."""
        return [outcome for outcome in self.outcomes[: self.first_epoch] if not outcome.skipped]

    def add(self, outcome: Outcome, seen: Seen, *, first_epoch: bool) -> None:
        """What a refused update saw is forgotten with it."""
        if first_epoch:
            self.first_epoch += 1
        if first_epoch and not outcome.skipped:
            self.entropy |= seen.entropy
            if not self.changed:
                self.logprobs |= seen.logprobs
        self.outcomes.append(outcome)


class Updater:
    """Makes one update of each model after another."""

    def __init__(
        self,
        optimizer: Optimizer,
        critic: Critic | None,
        accumulator: Accumulator,
        replicas: Replicas,
    ) -> None:
        self._optimizer = optimizer
        self._critic = critic
        self._accumulator = accumulator
        self._replicas = replicas

    def update(
        self, examples: Sequence[Example], objective: Objective, lr: float, *, policy: bool
    ) -> tuple[Outcome, Seen] | None:
        """Updates the critic and, with `policy`, the policy too; None when there is nothing to do.

        When anything about either is not finite, on any rank, neither is changed on any.
        """
        moving = [example for example in examples if example.moves] if policy else []
        if not moving and (self._critic is None or not examples):
            return None
        sums, seen = Sums(), Seen()
        if moving:
            sums, seen = self._accumulator.policy(moving, objective)
        if self._critic is not None:
            sums += self._accumulator.critic(examples)
        sums = sums.over(self._replicas)
        return Outcome(sums, *self._apply(sums, lr, policy=bool(moving))), seen

    def _apply(self, sums: Sums, lr: float, *, policy: bool) -> tuple[Update | None, Update | None]:
        """A clamp passes no gradient for NaN, so losses are looked at as well as norms."""
        chosen = [(self._optimizer, lr)] if policy else []
        if self._critic is not None:
            chosen.append((self._critic.optimizer, self._critic.config.lr))
        for optimizer, _ in chosen:
            optimizer.add_up(self._replicas)
        norms = [optimizer.gradient_norm() for optimizer, _ in chosen]
        figures = (sums.loss, sums.value_loss, *(float(norm) for norm in norms))
        if all(math.isfinite(figure) for figure in figures):
            pairs = zip(chosen, norms, strict=True)
            updates = [optimizer.step(rate, norm) for (optimizer, rate), norm in pairs]
        else:
            _log.warning("an update is refused: of losses and gradient norms, %s", figures)
            updates = [optimizer.discard() for optimizer, _ in chosen]
        own = updates.pop(0) if policy else None
        return own, updates[0] if updates else None
