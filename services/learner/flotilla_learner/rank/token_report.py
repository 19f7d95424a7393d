"""Metrics, histograms and values of a step's tokens, and the mismatch of each version; no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flotilla_learner.algo.mismatch import measure_mismatch, measure_version_mismatch
from flotilla_learner.rank import step_histograms as histograms
from flotilla_learner.rank.rows import ByRow
from flotilla_learner.rank.step_examples import PreparedBatch, TrainExample
from flotilla_learner.types import Histogram, Standing, StepTokens, TrainBatch, VersionMismatch


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Logprobs, entropy and correction weights of the trained rows; arrays [policy tokens], by
    row."""

    # At the start of the step.
    logprobs: ByRow
    # In the first epoch.
    entropy: ByRow
    corrections: ByRow


def mismatch_metrics(
    evidence: TokenStats, examples: Mapping[int, TrainExample]
) -> dict[str, float]:
    """Compare trainer, at the start of the step, and sampler; see `Mismatch.to_metrics`."""
    logprobs, behaviour = _paired_logprobs(evidence.logprobs, examples)
    return measure_mismatch(torch.from_numpy(logprobs), torch.from_numpy(behaviour)).to_metrics()


def post_update_kl(before: ByRow, after: ByRow) -> float:
    """Return the k3 estimate of KL(policy before || after) per token; 0 without scores."""
    indices = sorted(after)
    old, new = (concat_arrays([scores[i] for i in indices]) for scores in (before, after))
    found = measure_mismatch(torch.from_numpy(new), torch.from_numpy(old))
    return found.kl / max(1, found.tokens)


def version_mismatches(
    batch: TrainBatch, evidence: TokenStats, examples: Mapping[int, TrainExample]
) -> dict[int, VersionMismatch]:
    """Measure the mismatch of each version that began a sequence.

    That version is the trainer's at the step's start minus the sequence's lag."""
    by_version: dict[int, list[int]] = {}
    for index in sorted(evidence.logprobs):
        version = batch.step - 1 - examples[index].row.staleness
        by_version.setdefault(version, []).append(index)
    found: dict[int, VersionMismatch] = {}
    for version, indices in sorted(by_version.items()):
        chosen = {index: evidence.logprobs[index] for index in indices}
        logprobs, behaviour = _paired_logprobs(chosen, examples)
        found[version] = measure_version_mismatch(
            torch.from_numpy(logprobs), torch.from_numpy(behaviour)
        )
    return found


def step_histograms(
    batch: TrainBatch,
    prepared: PreparedBatch,
    evidence: TokenStats,
    examples: Mapping[int, TrainExample],
) -> dict[str, Histogram]:
    """Return histograms by policy token, except for the lengths.

    - mismatch/logprob_abs_diff, mismatch/is_ratio: trainer, at the step's start, against sampler
    - policy/token_entropy: nats, in the first epoch
    - policy/advantage: for all sequences, including untrained ones
    - policy/response_tokens: policy tokens of each attempt"""
    logprobs, behaviour = _paired_logprobs(evidence.logprobs, examples)
    difference = logprobs - behaviour
    lengths: dict[tuple[str, int], int] = {}
    for sequence in batch.sequences:
        key = (sequence.group_id, sequence.attempt_index)
        lengths[key] = lengths.get(key, 0) + int(sequence.policy_mask.sum())
    values = {
        "mismatch/logprob_abs_diff": ([np.abs(difference)], histograms.MAGNITUDES),
        "mismatch/is_ratio": ([np.exp(difference.clip(-20, 20))], histograms.RATIOS),
        "policy/token_entropy": (list(evidence.entropy.values()), histograms.MAGNITUDES),
        "policy/advantage": (prepared.advantages, histograms.ADVANTAGES),
        "policy/response_tokens": ([list(lengths.values())], histograms.LENGTHS),
    }
    return {name: histograms.bin_values(*pair) for name, pair in values.items()}


def step_tokens(
    prepared: PreparedBatch, evidence: TokenStats, examples: Mapping[int, TrainExample]
) -> StepTokens:
    """Return the values for every policy token of the batch."""
    advantages = tuple(values.astype(np.float32) for values in prepared.advantages)
    unknown = [np.full(len(values), np.nan, np.float32) for values in advantages]

    def fill_gaps(found: ByRow) -> tuple[NDArray[np.float32], ...]:
        return tuple(found.get(index, gap) for index, gap in enumerate(unknown))

    return StepTokens(
        tuple(_standing(examples.get(index)) for index in range(len(advantages))),
        advantages,
        fill_gaps(evidence.logprobs),
        fill_gaps(evidence.entropy),
        fill_gaps(evidence.corrections),
    )


def _standing(example: TrainExample | None) -> Standing:
    if example is None:
        return Standing.LEFT_OUT
    return Standing.TRAINED if example.moves else Standing.NO_SIGNAL


def _paired_logprobs(
    logprobs: ByRow, examples: Mapping[int, TrainExample]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the trainer's and sampler's logprobs of the same tokens, in batch order."""
    indices = sorted(logprobs)
    return (
        concat_arrays([logprobs[index] for index in indices]),
        concat_arrays([examples[index].row.behaviour for index in indices]),
    )


def concat_arrays(arrays: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *arrays]).astype(np.float64)
