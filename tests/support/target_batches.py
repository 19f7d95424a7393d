"""Batches of random sequences with targets and losses that a caller names; no torch."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flotilla_learner.ranks import training_protocol
from flotilla_learner.training_types import TargetBatch, TargetScores, TargetSequence

VOCABULARY = 97
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIPS,
    "cispo": CLIPS,
    "dro": {"beta": 0.05},
    "gspo": CLIPS,
}


def make_batch(
    loss: str = "cross_entropy",
    *,
    seed: int = 1,
    count: int = 4,
    targets: int = 1,
    forward_only: bool = False,
    masked: bool = False,
    prompt: int = 0,
) -> TargetBatch:
    """Sequences of 5 to 30 tokens, of which they share the first `prompt`, with weights of both
    signs, some of them 0."""
    rng = np.random.default_rng(seed)
    sequences = [_make_sequence(rng, loss, targets, masked=masked) for _ in range(count)]
    for sequence in sequences:
        shared = sequences[0].token_ids[:prompt]
        sequence.token_ids[: len(shared)] = shared[: len(sequence.token_ids)]
    return TargetBatch(loss, OPTIONS[loss], sequences, forward_only)


def _make_sequence(
    rng: np.random.Generator, loss: str, targets: int, *, masked: bool
) -> TargetSequence:
    length = int(rng.integers(5, 30))
    shape = (length,) if targets == 1 else (length, targets)

    def normal(mean: float = 0.0, deviation: float = 1.0) -> NDArray[np.float32]:
        values = rng.normal(mean, deviation, shape)
        return np.where(rng.random(shape) < 0.2, 0, values).astype(np.float32)

    if loss == "cross_entropy":
        inputs = {"weights": normal()}
    else:
        sampled = rng.normal(-4.5, 0.5, shape).astype(np.float32)
        inputs = {"logprobs": sampled, "advantages": normal()}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (rng.random(shape) < 0.7).astype(np.float32)
    if masked:
        inputs["mask"] = (rng.random(shape) < 0.5).astype(np.float32)
    ids = rng.integers(0, VOCABULARY, length).astype(np.int32)
    return TargetSequence(ids, rng.integers(0, VOCABULARY, shape), inputs)


def arguments_of(batch: TargetBatch, folder: Path, model: str) -> dict[str, object]:
    """Write a batch as the service does; return the command's arguments."""
    path = folder / "batch.safetensors"
    return {**training_protocol.write_targets(path, batch), "model": model}


def equal(one: TargetScores, other: TargetScores) -> bool:
    """Return True if both have the same bits."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return one.metrics == other.metrics and all(np.array_equal(a, b) for a, b in pairs)
