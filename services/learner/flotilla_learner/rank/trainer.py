"""One training step: scores, advantages, packs, fused loss, optimizer updates, metrics."""

import logging
import time
from collections.abc import Mapping

import numpy as np

from flotilla_learner.algo.advantages import ADVANTAGES
from flotilla_learner.algo.objective import Objective
from flotilla_learner.algo.plugin_registry import load_plugins
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import step_report, token_report
from flotilla_learner.rank.critic import Critic
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.gradient_accumulator import GradientAccumulator
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.model_updates import JointUpdater, UpdateHistory
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.reference import ReferencePolicy
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.scoring import score_rows
from flotilla_learner.rank.step_examples import (
    PreparedBatch,
    TrainExample,
    norm_tokens_of,
    rows_of,
)
from flotilla_learner.rank.step_preparation import BatchPreparer, NotFiniteError
from flotilla_learner.rank.token_report import TokenStats
from flotilla_learner.types import BatchScore, StepResult, TrainBatch

# The process's output is the rank's log.
_log = logging.getLogger(__name__)


class Trainer:
    """Makes the optimizer updates of a step. Deterministic given parameters, state and batch."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        algorithm: AlgorithmConfig,
        rank: RankConfig,
        *,
        reference: ReferencePolicy | None = None,
        critic: Critic | None = None,
        replicas: Replicas | None = None,
        steps_before: int = 0,
    ) -> None:
        """Build the trainer, of a run whose first `steps_before` steps another one trains.

        A missing reference or critic that the algorithm needs is made from the current policy.
        Raises ValueError for unregistered names, and for anything that the algorithm lacks."""
        _check_algorithm(algorithm)
        if reference is None and algorithm.kl.needs_reference:
            reference = ReferencePolicy.copy_of(policy, offload=rank.offload_reference)
        if critic is None and algorithm.advantage == "gae":
            offload = rank.offload_optimizer
            critic = Critic(policy, algorithm.critic, optimizer.config, offload=offload)
        self.critic = critic
        self._policy = policy
        self._algorithm = algorithm
        self._rank = rank
        self._steps_before = steps_before
        replicas = replicas or Replicas()
        packer = RowPacker(policy, rank.pack_tokens, replicas)
        norm_tokens = norm_tokens_of(algorithm, policy.max_model_len)
        self._packer = packer
        self._preparer = BatchPreparer(
            policy, reference, critic, algorithm, packer, rank.head_chunk, norm_tokens
        )
        bonus = algorithm.entropy_coefficient != 0
        accumulator = GradientAccumulator(
            policy, critic, packer, chunk=rank.head_chunk, entropy_bonus=bonus
        )
        self._updater = JointUpdater(optimizer, critic, accumulator, replicas)

    def train_step(self, batch: TrainBatch, lr: float) -> StepResult:
        """Make the updates; `skipped` is True if any was refused as not finite.

        Groups without a signal take part in the normalisation, but are not computed if their
        gradient is 0. A mini-batch of nothing else makes no update. Non-finite results of the
        reference, the critic or the policy refuse the whole step."""
        with self._policy.showing(batch):
            return self._make_updates(batch, lr)

    def score_batch(self, batch: TrainBatch) -> BatchScore:
        """Score the policy tokens of a batch under the current parameters, and change nothing."""
        rows = rows_of(batch)
        with self._policy.showing(batch):
            found = score_rows(self._policy, rows, self._packer, chunk=self._rank.head_chunk)
        # In batch order and float64, so that the sum does not depend on packs and ranks.
        scores = np.concatenate([np.zeros(0), *(found[index] for index in sorted(found))])
        return BatchScore(len(scores), float(-scores.mean()) if len(scores) else 0.0)

    def _make_updates(self, batch: TrainBatch, lr: float) -> StepResult:
        started = time.monotonic()
        objective = Objective(self._algorithm, batch.settings, imitated=batch.imitated)
        try:
            prepared = self._preparer.prepare_batch(batch, objective)
        except NotFiniteError as error:
            _log.warning("step %d is refused: %s", batch.step, error)
            refused = float(self._algorithm.epochs * self._algorithm.mini_batches)
            metrics = {"policy/lr": lr, "policy/updates": 0.0, "policy/skipped": refused}
            return StepResult(metrics, time.monotonic() - started, skipped=True)
        history = UpdateHistory()
        own_step, critic = batch.step - self._steps_before, self._algorithm.critic
        policy = own_step > critic.warmup_steps or self.critic is None
        for epoch in range(self._algorithm.epochs):
            for part in prepared.mini_batches:
                done = self._updater.update_models(part, objective, lr, policy=policy)
                if done is not None:
                    history.add_outcome(*done, first_epoch=epoch == 0)
        return self._make_result(batch, prepared, history, lr, started)

    def _make_result(
        self,
        batch: TrainBatch,
        prepared: PreparedBatch,
        history: UpdateHistory,
        lr: float,
        started: float,
    ) -> StepResult:
        examples = {example.row.index: example for example in prepared.examples}
        evidence = self._gather_token_stats(examples, history)
        metrics = step_report.policy_metrics(history, len(prepared.mini_batches), lr)
        metrics |= token_report.mismatch_metrics(evidence, examples)
        metrics |= step_report.routing_metrics(history)
        metrics |= step_report.compilation_metrics(self._policy.compiled)
        metrics |= self._post_update_metrics(examples, evidence, history)
        if self._algorithm.kl.coefficient > 0:
            metrics |= step_report.kl_metrics(history)
        if batch.settings.taught:
            metrics |= step_report.teacher_metrics(batch, history, self._algorithm.distillation)
        if self.critic is not None:
            metrics |= step_report.critic_metrics(history, prepared.examples)
        return StepResult(
            metrics,
            time.monotonic() - started,
            skipped=len(history.made_outcomes) < len(history.outcomes),
            histograms=token_report.step_histograms(batch, prepared, evidence, examples),
            versions=token_report.version_mismatches(batch, evidence, examples),
            tokens=token_report.step_tokens(prepared, evidence, examples),
        )

    def _gather_token_stats(
        self, examples: Mapping[int, TrainExample], history: UpdateHistory
    ) -> TokenStats:
        """Gather the statistics of the rows that moved, from all ranks."""
        rows = [example.row for example in examples.values() if example.moves]
        logprobs = self._packer.gather_by_row(history.logprobs, rows)
        scored = {
            index: example.proximal
            for index, example in examples.items()
            if example.proximal is not None
        }
        return TokenStats(
            scored or logprobs,
            self._packer.gather_by_row(history.entropy, rows),
            self._packer.gather_by_row(history.corrections, rows),
        )

    def _post_update_metrics(
        self, examples: Mapping[int, TrainExample], evidence: TokenStats, history: UpdateHistory
    ) -> dict[str, float]:
        """Measure policy/post_update_kl: how far the step moved the policy on its own batch.

        It is the only sign of a learning rate that is too low: with one update a step, the clip
        sees ratios of 1 at any rate. Sequences are taken in batch order up to the configured
        number of tokens, so this may cover a part of the batch."""
        budget = self._rank.post_update_tokens
        if budget == 0 or not evidence.logprobs:
            return {}
        if not history.policy_changed:
            return {"policy/post_update_kl": 0.0}
        chosen: list[Row] = []
        for index in sorted(evidence.logprobs):
            row = examples[index].row
            budget -= len(row.token_ids)
            if budget >= 0 or not chosen:
                chosen.append(row)
        after = score_rows(self._policy, chosen, self._packer, chunk=self._rank.head_chunk)
        return {"policy/post_update_kl": token_report.post_update_kl(evidence.logprobs, after)}


def _check_algorithm(algorithm: AlgorithmConfig) -> None:
    load_plugins(algorithm.plugins)
    ADVANTAGES.get(algorithm.advantage)
    Objective(algorithm)
