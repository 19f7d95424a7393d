"""Metrics and histograms of a step, and the mismatch of each version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.learner.algo.mismatch import measure_mismatch, measure_version_mismatch
from services.learner.rank import step_histograms as histograms
from services.learner.rank.block_compilation import CompiledBlocks
from services.learner.rank.gradient_accumulator import MiniBatchSums
from services.learner.rank.model_updates import UpdateHistory, UpdateOutcome
from services.learner.rank.packed_rows import ByRow
from services.learner.rank.step_preparation import PreparedBatch, TrainExample
from services.learner.types import Histogram, Standing, StepTokens, TrainBatch, VersionMismatch


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Logprobs, entropy and correction weights of the trained rows; arrays [policy tokens], by
    row."""

    # At the start of the step.
    logprobs: ByRow
    # In the first epoch.
    entropy: ByRow
    corrections: ByRow


def policy_metrics(history: UpdateHistory, mini_batches: int, lr: float) -> dict[str, float]:
    """Return metrics of the updates that were made.

    - policy/loss: mean over the first epoch's mini-batches
    - policy/entropy: mean over the tokens trained on in it, in nats
    - policy/clip_ratio: share of the tokens, over all updates, where the loss's clip took effect
    - policy/grad_norm: mean over updates, before clipping
    - policy/updates, policy/skipped: updates made, and refused
    - policy/shared_prompt_share: share of the sequences' tokens, over all updates, that were not
      computed because another sequence of the pack begins with the same prompt
    - mismatch/masked_fraction, mismatch/masked_sequences, policy/correction_weight: shares of
      tokens and sequences that a correction masked, and its mean weight"""
    sums = _sum_outcomes(history.made_in_first_epoch)
    whole = _sum_outcomes(history.made_outcomes)
    seen, ever = sums.objective, whole.objective
    updates = [outcome.policy for outcome in history.made_outcomes if outcome.policy is not None]
    found = {
        "policy/loss": sums.loss / max(1, mini_batches),
        "policy/grad_norm": _mean_or_zero([update.grad_norm for update in updates]),
        "policy/lr": lr,
        "policy/updates": float(len(updates)),
        "policy/skipped": float(len(history.outcomes) - len(history.made_outcomes)),
    }
    if not seen.tokens:
        return found
    return found | {
        "policy/entropy": sums.entropy / seen.tokens,
        "policy/clip_ratio": ever.clipped / ever.tokens,
        "policy/shared_prompt_share": 1 - whole.computed_tokens / whole.row_tokens,
        "policy/correction_weight": seen.weight / seen.tokens,
        "mismatch/masked_fraction": seen.masked / seen.tokens,
        "mismatch/masked_sequences": seen.masked_sequences / seen.sequences,
    }


def compilation_metrics(compiled: CompiledBlocks | None) -> dict[str, float]:
    """Return metrics of compiled blocks, if compilation is on.

    - policy/uncompiled_blocks: those that torch could not compile
    - policy/compiled_graphs: graphs that were compiled since the previous step"""
    if compiled is None:
        return {}
    return {
        "policy/uncompiled_blocks": float(compiled.uncompiled),
        "policy/compiled_graphs": float(compiled.take_graph_count()),
    }


def routing_metrics(history: UpdateHistory) -> dict[str, float]:
    """Compare the engine's routers with the trainer's, if the engine named experts.

    Shares in the first epoch:
    - mismatch/rerouted_tokens: tokens that differ in any layer
    - mismatch/rerouted_choices: tokens of all layers"""
    seen = _sum_outcomes(history.made_in_first_epoch)
    if not seen.routed_tokens:
        return {}
    return {
        "mismatch/rerouted_tokens": seen.rerouted_tokens / seen.routed_tokens,
        "mismatch/rerouted_choices": seen.rerouted_choices / seen.routed_choices,
    }


def kl_metrics(history: UpdateHistory) -> dict[str, float]:
    """Return policy/kl: the estimate of the KL that algorithm.kl penalises, mean over the first
    epoch's tokens."""
    seen = _sum_outcomes(history.made_in_first_epoch).objective
    return {"policy/kl": seen.kl / seen.tokens} if seen.tokens else {}


def critic_metrics(history: UpdateHistory, examples: Sequence[TrainExample]) -> dict[str, float]:
    """Return metrics of the critic's updates.

    - policy/value_loss, policy/value_clip_ratio: like the policy's namesakes
    - policy/value_explained_variance: 1 - var(return - value) / var(return), over the tokens
      trained on, with the values before the step; 0 if returns do not vary"""
    sums, ever = _sum_outcomes(history.made_in_first_epoch), _sum_outcomes(history.made_outcomes)
    updates = [outcome.critic for outcome in history.made_outcomes if outcome.critic is not None]
    returns = _concat_arrays([e.returns for e in examples if e.returns is not None])
    values = _concat_arrays([e.values for e in examples if e.values is not None])
    spread = float(returns.var()) if len(returns) else 0.0
    left = float((returns - values).var()) if spread else 0.0
    return {
        "policy/value_loss": sums.value_loss / max(1, len(history.made_in_first_epoch)),
        "policy/value_clip_ratio": ever.value_clipped / max(1, ever.value_tokens),
        "policy/value_grad_norm": _mean_or_zero([update.grad_norm for update in updates]),
        "policy/value_explained_variance": 1 - left / spread if spread else 0.0,
    }


def mismatch_metrics(
    evidence: TokenStats, examples: Mapping[int, TrainExample]
) -> dict[str, float]:
    """Compare trainer, at the start of the step, and sampler; see `Mismatch.to_metrics`."""
    logprobs, behaviour = _paired_logprobs(evidence.logprobs, examples)
    return measure_mismatch(torch.from_numpy(logprobs), torch.from_numpy(behaviour)).to_metrics()


def post_update_kl(before: ByRow, after: ByRow) -> float:
    """Return the k3 estimate of KL(policy before || after) per token; 0 without scores."""
    indices = sorted(after)
    old, new = (_concat_arrays([scores[i] for i in indices]) for scores in (before, after))
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


def _sum_outcomes(outcomes: Sequence[UpdateOutcome]) -> MiniBatchSums:
    return sum((outcome.sums for outcome in outcomes), MiniBatchSums())


def _paired_logprobs(
    logprobs: ByRow, examples: Mapping[int, TrainExample]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the trainer's and sampler's logprobs of the same tokens, in batch order."""
    indices = sorted(logprobs)
    return (
        _concat_arrays([logprobs[index] for index in indices]),
        _concat_arrays([examples[index].row.behaviour for index in indices]),
    )


def _concat_arrays(arrays: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *arrays]).astype(np.float64)


def _mean_or_zero(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
