"""The result of a step from the answers of a service: the fields that our own ranks report, as far
as answers tell."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.hosted.ports import Answer
from flotilla_learner.rank import token_report
from flotilla_learner.rank.rows import ByRow
from flotilla_learner.rank.step_examples import (
    ModelScores,
    PreparedBatch,
    TrainExample,
    find_targets,
    make_examples,
    norm_tokens_of,
    rows_of,
)
from flotilla_learner.rank.token_report import TokenStats
from flotilla_learner.tracking.tinker_metrics import advantage_metrics
from flotilla_learner.training_types import TargetScores
from flotilla_learner.types import StepResult, StepTokens, TrainBatch

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
    stats = TokenStats(_first_logprobs(parts, answers), {}, {})
    examples = {example.row.index: example for example in prepared.examples}
    own = {
        **_update_metrics(answers, len(parts), len(prepared.mini_batches)),
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


def _update_metrics(answers: Sequence[Answer], parts: int, mini_batches: int) -> dict[str, float]:
    """Return metrics of the updates: the loss over the first epoch, and the mean norm of gradients,
    if the service tells them. SkyRL's tells no loss."""
    scores = [each for each in answers if isinstance(each, TargetScores)]
    updates = [each for each in answers if isinstance(each, Mapping)]
    found = {"policy/updates": float(len(updates)), "policy/skipped": 0.0}
    losses = [each.metrics[_LOSS] for each in scores[:parts] if _LOSS in each.metrics]
    if len(losses) == parts:
        found["policy/loss"] = sum(losses) / max(1, mini_batches)
    if norms := [each[_GRAD_NORM] for each in updates if _GRAD_NORM in each]:
        found["policy/grad_norm"] = float(np.mean(norms))
    return found


def _first_logprobs(parts: Sequence[Sequence[TrainExample]], answers: Sequence[Answer]) -> ByRow:
    """Return the logprobs at the start of the step: those of the first update."""
    scores = next((each for each in answers if isinstance(each, TargetScores)), None)
    if scores is None:
        return {}
    pairs = zip(parts[0], scores.logprobs, strict=True)
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
