"""Metrics of a step's updates."""

from collections.abc import Sequence

import numpy as np

from flotilla_learner.config.algorithm import DistillationConfig
from flotilla_learner.rank.block_compilation import CompiledBlocks
from flotilla_learner.rank.gradient_accumulator import MiniBatchSums
from flotilla_learner.rank.model_updates import UpdateHistory, UpdateOutcome
from flotilla_learner.rank.step_examples import TrainExample
from flotilla_learner.rank.token_report import concat_arrays
from flotilla_learner.types import TrainBatch


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


def teacher_metrics(
    batch: TrainBatch, history: UpdateHistory, config: DistillationConfig
) -> dict[str, float]:
    """Return metrics of a step with a teacher.

    - teacher/reverse_kl: mean over all policy tokens of the batch of log sampler - log teacher, the
      estimate of KL(policy || teacher) by sampled tokens
    - teacher/divergence: that over the teacher's likeliest tokens, which is in the loss; mean over
      the first epoch's tokens, with `distillation.top_k`"""
    gaps = [
        each.behaviour_logprobs[each.policy_mask] - each.teacher.logprobs
        for each in batch.sequences
        if each.teacher is not None
    ]
    found = {"teacher/reverse_kl": float(concat_arrays(gaps).mean(dtype=np.float64))}
    seen = _sum_outcomes(history.made_in_first_epoch).objective
    if config.top_k and seen.tokens:
        found["teacher/divergence"] = seen.divergence / seen.tokens
    return found


def critic_metrics(history: UpdateHistory, examples: Sequence[TrainExample]) -> dict[str, float]:
    """Return metrics of the critic's updates.

    - policy/value_loss, policy/value_clip_ratio: like the policy's namesakes
    - policy/value_explained_variance: 1 - var(return - value) / var(return), over the tokens
      trained on, with the values before the step; 0 if returns do not vary"""
    sums, ever = _sum_outcomes(history.made_in_first_epoch), _sum_outcomes(history.made_outcomes)
    updates = [outcome.critic for outcome in history.made_outcomes if outcome.critic is not None]
    returns = concat_arrays([e.returns for e in examples if e.returns is not None])
    values = concat_arrays([e.values for e in examples if e.values is not None])
    spread = float(returns.var()) if len(returns) else 0.0
    left = float((returns - values).var()) if spread else 0.0
    return {
        "policy/value_loss": sums.value_loss / max(1, len(history.made_in_first_epoch)),
        "policy/value_clip_ratio": ever.value_clipped / max(1, ever.value_tokens),
        "policy/value_grad_norm": _mean_or_zero([update.grad_norm for update in updates]),
        "policy/value_explained_variance": 1 - left / spread if spread else 0.0,
    }


def _sum_outcomes(outcomes: Sequence[UpdateOutcome]) -> MiniBatchSums:
    return sum((outcome.sums for outcome in outcomes), MiniBatchSums())


def _mean_or_zero(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
