"""What a step says about itself: metrics, histograms, and the mismatch of each version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.learner.algo.mismatch import distribution, measure
from services.learner.rank import step_histograms as histograms
from services.learner.rank.gradients import Sums
from services.learner.rank.joint_update import History, Outcome
from services.learner.rank.packed_rows import ByRow
from services.learner.rank.step_preparation import Example, Prepared
from services.learner.types import Histogram, TrainBatch, VersionMismatch


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of the rows that are trained on; arrays [policy tokens], by row."""

    # As the step began.
    logprobs: ByRow
    # In the first epoch.
    entropy: ByRow


def policy_metrics(history: History, mini_batches: int, lr: float) -> dict[str, float]:
    """Of the updates that were made.

    - policy/loss: mean over the first epoch's mini-batches
    - policy/entropy: mean over the tokens trained on in it, in nats
    - policy/clip_ratio: share of the tokens, over all updates, where the loss's clip took effect
    - policy/grad_norm: mean over updates, before clipping
    - policy/updates, policy/skipped: updates made, and refused
    - mismatch/masked_fraction, mismatch/masked_sequences, policy/correction_weight: of tokens and
      sequences that a correction masked, and its mean weight
    """
    sums = _sums(history.made_first)
    seen, ever = sums.objective, _sums(history.made).objective
    updates = [outcome.policy for outcome in history.made if outcome.policy is not None]
    found = {
        "policy/loss": sums.loss / max(1, mini_batches),
        "policy/grad_norm": _mean([update.grad_norm for update in updates]),
        "policy/lr": lr,
        "policy/updates": float(len(updates)),
        "policy/skipped": float(len(history.outcomes) - len(history.made)),
    }
    if not seen.tokens:
        return found
    return found | {
        "policy/entropy": sums.entropy / seen.tokens,
        "policy/clip_ratio": ever.clipped / ever.tokens,
        "policy/correction_weight": seen.weight / seen.tokens,
        "mismatch/masked_fraction": seen.masked / seen.tokens,
        "mismatch/masked_sequences": seen.masked_sequences / seen.sequences,
    }


def kl_metrics(history: History) -> dict[str, float]:
    """policy/kl: the estimate of KL(policy || reference), mean over the first epoch's tokens."""
    seen = _sums(history.made_first).objective
    return {"policy/kl": seen.kl / seen.tokens} if seen.tokens else {}


def critic_metrics(history: History, examples: Sequence[Example]) -> dict[str, float]:
    """policy/value_loss and policy/value_clip_ratio as their namesakes of the policy;
    policy/value_explained_variance = 1 - var(return - value) / var(return), over the tokens
    trained on, with the values before the step; 0 where returns do not vary."""
    sums, ever = _sums(history.made_first), _sums(history.made)
    updates = [outcome.critic for outcome in history.made if outcome.critic is not None]
    returns = _flat([e.returns for e in examples if e.returns is not None])
    values = _flat([e.values for e in examples if e.values is not None])
    spread = float(returns.var()) if len(returns) else 0.0
    left = float((returns - values).var()) if spread else 0.0
    return {
        "policy/value_loss": sums.value_loss / max(1, len(history.made_first)),
        "policy/value_clip_ratio": ever.value_clipped / max(1, ever.value_tokens),
        "policy/value_grad_norm": _mean([update.grad_norm for update in updates]),
        "policy/value_explained_variance": 1 - left / spread if spread else 0.0,
    }


def mismatch_metrics(evidence: Evidence, examples: Mapping[int, Example]) -> dict[str, float]:
    """Trainer, as the step began, against sampler; see `Mismatch.metrics`."""
    logprobs, behaviour = _pair(evidence.logprobs, examples)
    kept = torch.ones(len(logprobs), dtype=torch.bool)
    found = measure(torch.from_numpy(logprobs), torch.from_numpy(behaviour), kept).metrics()
    found.pop("mismatch/masked_fraction", None)
    return found


def post_update_kl(before: ByRow, after: ByRow) -> float:
    """The k3 estimate of KL(policy before || after) per token; 0 where nothing was scored."""
    indices = sorted(after)
    old, new = (_flat([scores[i] for i in indices]) for scores in (before, after))
    kept = torch.ones(len(old), dtype=torch.bool)
    found = measure(torch.from_numpy(new), torch.from_numpy(old), kept)
    return found.kl / max(1, found.tokens)


def version_mismatches(
    batch: TrainBatch, evidence: Evidence, examples: Mapping[int, Example]
) -> dict[int, VersionMismatch]:
    """By the version that began a sequence: the trainer's at the step's start less its lag."""
    by_version: dict[int, list[int]] = {}
    for index in sorted(evidence.logprobs):
        version = batch.step - 1 - examples[index].row.staleness
        by_version.setdefault(version, []).append(index)
    found: dict[int, VersionMismatch] = {}
    for version, indices in sorted(by_version.items()):
        chosen = {index: evidence.logprobs[index] for index in indices}
        logprobs, behaviour = _pair(chosen, examples)
        found[version] = distribution(torch.from_numpy(logprobs), torch.from_numpy(behaviour))
    return found


def step_histograms(
    batch: TrainBatch, prepared: Prepared, evidence: Evidence, examples: Mapping[int, Example]
) -> dict[str, Histogram]:
    """By policy token, but for the lengths.

    - mismatch/logprob_abs_diff, mismatch/is_ratio: trainer, as the step began, against sampler
    - policy/token_entropy: nats, in the first epoch
    - policy/advantage: of all sequences, those that are not trained on too
    - policy/response_tokens: policy tokens of each attempt
    """
    logprobs, behaviour = _pair(evidence.logprobs, examples)
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
    return {name: histograms.histogram(*pair) for name, pair in values.items()}


def _sums(outcomes: Sequence[Outcome]) -> Sums:
    return sum((outcome.sums for outcome in outcomes), Sums())


def _pair(
    logprobs: ByRow, examples: Mapping[int, Example]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Trainer's and sampler's logprobs of the same tokens, in the batch's order."""
    indices = sorted(logprobs)
    return (
        _flat([logprobs[index] for index in indices]),
        _flat([examples[index].row.behaviour for index in indices]),
    )


def _flat(arrays: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *arrays]).astype(np.float64)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
