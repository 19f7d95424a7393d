"""Every part of a step scores a token among its candidates: those of other sequences in a pack, of
other chunks and of tokens without any change nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flotilla_learner.algo.predicting_positions import predicting_positions
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.types import StepResult, TrainBatch, TrainSequence
from tests.support.tiny_ranks import (
    VOCAB,
    changed,
    make_batch,
    make_prompted_batch,
    make_trainer,
    parameters,
)

EVERYTHING: dict[str, Any] = {
    "proximal": "trainer",
    "entropy_coefficient": 0.02,
    "kl": {"coefficient": 0.05},
}


def with_candidates(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """The batch with 1 to 9 candidates of each policy token, of another width in each sequence; the
    last sequence has none."""
    rng = np.random.default_rng(seed)
    *most, last = batch.sequences
    held = [replace(s, candidates=draw(rng, s, 9 - i % 3)) for i, s in enumerate(most)]
    return replace(batch, sequences=(*held, last))


def draw(rng: np.random.Generator, sequence: TrainSequence, width: int) -> np.ndarray:
    sampled = sequence.token_ids[sequence.policy_mask]
    found = np.full((len(sampled), width), -1, np.int32)
    for row, token in zip(found, sampled, strict=True):
        others = rng.permutation(np.delete(np.arange(VOCAB), token))
        count = int(rng.integers(1, width + 1))
        row[:count] = rng.permutation([token, *others[: count - 1]])
    return found


@torch.no_grad()
def by_hand(policy: Policy, sequence: TrainSequence) -> tuple[np.ndarray, np.ndarray]:
    """Return logprobs and entropy of the policy tokens, by transformers and a log_softmax over the
    candidates."""
    ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0] / sequence.temperature
    scores: list[float] = []
    entropy: list[float] = []
    positions = predicting_positions(sequence.policy_mask)
    for row, at in enumerate(positions.tolist()):
        every = np.arange(VOCAB, dtype=np.int32)[None].repeat(len(positions), 0)
        kept = (every if sequence.candidates is None else sequence.candidates)[row]
        kept = kept[kept >= 0].astype(np.int64)
        among = logits[at, torch.from_numpy(kept)].double().log_softmax(-1)
        scores.append(float(among[int(np.flatnonzero(kept == int(ids[at + 1]))[0])]))
        entropy.append(float(-(among.exp() * among).sum()))
    return np.array(scores), np.array(entropy)


def step(folder: Path, batch: TrainBatch, **options: Any) -> tuple[Policy, StepResult]:
    config = AlgorithmConfig.model_validate(EVERYTHING)
    policy, _, trainer = make_trainer(folder, algorithm=config, eps=1.0, **options)
    return policy, trainer.train_step(batch, 0.1)


@pytest.mark.parametrize("options", [{}, {"pack_tokens": 1, "head_chunk": 3}])
def test_a_step_scores_tokens_among_their_candidates(
    model_folder: Path, options: dict[str, Any]
) -> None:
    policy, *_ = make_trainer(model_folder)
    batch = with_candidates(make_batch(policy))
    expected = [by_hand(policy, sequence) for sequence in batch.sequences]
    _, found = step(model_folder, batch, **options)
    assert found.tokens is not None
    checked = 0
    for (scores, entropy), got, measured in zip(
        expected, found.tokens.logprobs, found.tokens.entropy, strict=True
    ):
        np.testing.assert_allclose(got, scores, rtol=0, atol=1e-5)
        if not np.isnan(measured).any():
            np.testing.assert_allclose(measured, entropy, rtol=0, atol=1e-5)
            checked += 1
    assert checked > 6


def test_kl_and_mismatch_are_of_the_same_distribution_on_all_sides(model_folder: Path) -> None:
    """The reference is the policy itself, and the sampler's logprobs are those by hand."""
    policy, *_ = make_trainer(model_folder)
    batch = with_candidates(make_batch(policy))
    sampled: list[TrainSequence] = []
    for sequence in batch.sequences:
        behaviour = np.zeros(len(sequence.token_ids), np.float32)
        behaviour[sequence.policy_mask] = by_hand(policy, sequence)[0]
        sampled.append(replace(sequence, behaviour_logprobs=behaviour))
    whole = replace(batch, sequences=tuple(sampled))
    metrics = step(model_folder, whole)[1].metrics
    assert metrics["mismatch/logprob_abs_diff_mean"] < 1e-5
    assert metrics["policy/kl"] == pytest.approx(0, abs=1e-6)
    without = step(model_folder, changed(whole, candidates=None))[1].metrics
    assert without["mismatch/logprob_abs_diff_mean"] > 1


@pytest.mark.parametrize(
    "options", [{"pack_tokens": 1}, {"pack_tokens": 4096, "head_chunk": 5}, {"head_chunk": 1000}]
)
def test_packs_chunks_and_shared_prompts_make_the_same_step(
    model_folder: Path, options: dict[str, Any]
) -> None:
    batch = with_candidates(make_prompted_batch())
    (one, alone), (other, packed) = step(model_folder, batch), step(model_folder, batch, **options)
    mine, theirs = parameters(one), parameters(other)
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-6)
    same = ("policy/loss", "policy/entropy", "policy/grad_norm", "policy/kl")
    for name in same:
        assert packed.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4, abs=1e-6), name
