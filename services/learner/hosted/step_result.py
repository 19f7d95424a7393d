"""The result of a step from the answers of a service: the fields that our own ranks report, as far
as answers tell."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from services.common.spec.spec import PolicyConfig
from services.learner.config.algorithm import AlgorithmConfig
from services.learner.hosted.ports import Answer
from services.learner.rank import token_report
from services.learner.rank.rows import ByRow
from services.learner.rank.step_examples import (
    ModelScores,
    PreparedBatch,
    TrainExample,
    find_targets,
    make_examples,
    norm_tokens_of,
    rows_of,
)
from services.learner.rank.token_report import TokenStats
from services.learner.tracking.tinker_metrics import advantage_metrics
from services.learner.training_types import TargetScores
from services.learner.types import StepResult, StepTokens, TrainBatch

_LOSS, _GRAD_NORM = "loss:sum", "grad_norm"


def prepare(batch: TrainBatch, algorithm: AlgorithmConfig, policy: PolicyConfig) -> PreparedBatch:
    """Return a batch's examples. Raises ValueError for rewards that cannot be compared."""
    targets = find_targets(batch, rows_of(batch), ModelScores(), algorithm)
    norm_tokens = norm_tokens_of(algorithm, policy.max_model_len)
    return make_examples(batch, targets, ModelScores(), algorithm, norm_tokens)


def make_result(
    batch: TrainBatch,
    prepared: PreparedBatch,
    parts: Sequence[Sequence[TrainExample]],
    answers: Sequence[Answer],
    metrics: Mapping[str, float],
    started: float,
) -> StepResult:
    """Return the result of a step, with `metrics` of the caller's.

    `parts` are the mini-batches that were sent, in each epoch; `answers` alternate between the
    scores and the metrics of an update."""
    scores = [each for each in answers if isinstance(each, TargetScores)]
    updates = [each for each in answers if isinstance(each, Mapping)]
    stats = TokenStats(_first_logprobs(parts, scores), {}, {})
    examples = {example.row.index: example for example in prepared.examples}
    own = {
        **_loss_metrics(scores[: len(parts)], len(prepared.mini_batches)),
        **_update_metrics(updates),
        **advantage_metrics(prepared.advantages),
        **token_report.mismatch_metrics(stats, examples),
    }
    tokens = token_report.step_tokens(prepared, stats, examples)
    return StepResult(
        {**own, **metrics},
        time.monotonic() - started,
        skipped=False,
        histograms=token_report.step_histograms(batch, prepared, stats, examples),
        versions=token_report.version_mismatches(batch, stats, examples),
        tokens=_of_whole_sequences(tokens, batch),
    )


def _loss_metrics(first: Sequence[TargetScores], mini_batches: int) -> dict[str, float]:
    """Return the mean loss of mini-batches if the service tells it, as SkyRL's does not."""
    losses = [found.metrics[_LOSS] for found in first if _LOSS in found.metrics]
    return {"policy/loss": sum(losses) / max(1, mini_batches)} if len(losses) == len(first) else {}


def _update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return metrics of the updates; the mean norm of their gradients if the service tells it."""
    norms = [each[_GRAD_NORM] for each in updates if _GRAD_NORM in each]
    found = {"policy/updates": float(len(updates)), "policy/skipped": 0.0}
    return {**found, "policy/grad_norm": float(np.mean(norms))} if norms else found


def _first_logprobs(
    parts: Sequence[Sequence[TrainExample]], scores: Sequence[TargetScores]
) -> ByRow:
    """Return the logprobs at the start of the step: those of the first update."""
    if not scores:
        return {}
    pairs = zip(parts[0], scores[0].logprobs, strict=True)
    return {
        example.row.index: values[example.row.positions].astype(np.float32)
        for example, values in pairs
    }


def _of_whole_sequences(tokens: StepTokens, batch: TrainBatch) -> StepTokens:
    """Return values for every policy token of the batch, also of those that were cut off: these
    have no advantage, and nothing is known of them."""
    counts = [int(sequence.policy_mask.sum()) for sequence in batch.sequences]

    def fill(
        columns: Sequence[NDArray[np.float32]], value: float
    ) -> tuple[NDArray[np.float32], ...]:
        return tuple(
            np.pad(values, (0, count - len(values)), constant_values=value)
            for values, count in zip(columns, counts, strict=True)
        )

    return replace(
        tokens,
        advantages=fill(tokens.advantages, 0.0),
        logprobs=fill(tokens.logprobs, np.nan),
        entropy=fill(tokens.entropy, np.nan),
        corrections=fill(tokens.corrections, np.nan),
    )
