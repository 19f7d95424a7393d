"""A step's report is true."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import step_histograms
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_batch, make_trainer, reference_logprobs, train


def differences(folder: Path, batch: TrainBatch, staleness: int) -> np.ndarray:
    """Trainer minus sampler on the policy tokens of the sequences that lag so far."""
    policy = load_policy(policy_config(folder), RankConfig())
    found = [
        (reference_logprobs(policy, s.token_ids, 0.8) - s.behaviour_logprobs[1:])[s.policy_mask[1:]]
        for s in batch.sequences
        if s.staleness == staleness
    ]
    return np.concatenate(found).astype(np.float64)


@pytest.mark.parametrize("proximal", ["behaviour", "trainer"])
def test_each_version_is_compared_on_its_own(model_folder: Path, proximal: str) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    made = make_batch(policy, step=7, shift=0.1)
    aged = tuple(replace(s, staleness=i % 3) for i, s in enumerate(made.sequences))
    batch = replace(made, sequences=aged)
    config = AlgorithmConfig.model_validate({"proximal": proximal, "epochs": 2})
    _, _, trainer = make_trainer(model_folder, algorithm=config)
    found = trainer.train_step(batch, lr=1e-2).versions
    assert set(found) == {4, 5, 6}
    for version, mismatch in found.items():
        difference = differences(model_folder, batch, 6 - version)
        assert mismatch.tokens == len(difference)
        assert mismatch.abs_diff == pytest.approx(np.abs(difference).mean(), rel=1e-4)
        assert mismatch.abs_diff_max == pytest.approx(np.abs(difference).max(), rel=1e-4)
        k3 = np.exp(difference) - 1 - difference
        assert mismatch.kl == pytest.approx(k3.mean(), rel=1e-3)


def test_mismatch_is_that_of_the_steps_start_however_many_updates_follow(
    model_folder: Path,
) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    batch = make_batch(policy)
    several = train(model_folder, batch, lr=0.03, epochs=2, mini_batches=3)
    scored = train(model_folder, batch, lr=0.03, epochs=2, mini_batches=3, proximal="trainer")
    for step in (several, scored):
        assert step.metrics["policy/post_update_kl"] > 1e-3
        assert step.metrics["mismatch/kl_train_infer"] < 1e-9
        assert step.result.versions[0].abs_diff < 1e-5
    # Of later mini-batches nothing is known from before the first update, unless it is scored.
    assert several.result.versions[0].tokens < scored.result.versions[0].tokens


def test_the_learning_rate_shows_in_the_post_update_kl_and_not_in_the_clip(
    model_folder: Path,
) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    metrics = [train(model_folder, make_batch(policy), lr=lr).metrics for lr in (1e-6, 1e-3, 1e-2)]
    assert [m["policy/clip_ratio"] for m in metrics] == [0.0, 0.0, 0.0]
    kl = [m["policy/post_update_kl"] for m in metrics]
    assert kl[0] < 1e-6 < 1e-4 < kl[1] < kl[2]


def post_update(folder: Path, tokens: int) -> dict[str, float]:
    policy, adamw, _ = make_trainer(folder)
    rank = RankConfig(pack_tokens=256, post_update_tokens=tokens)
    result = Trainer(policy, adamw, AlgorithmConfig(), rank).train_step(make_batch(policy), lr=1e-3)
    return dict(result.metrics)


def test_the_post_update_kl_is_sampled_or_left_out(model_folder: Path) -> None:
    whole, part, none = (post_update(model_folder, tokens) for tokens in (4096, 50, 0))
    assert "policy/post_update_kl" not in none
    assert whole["policy/post_update_kl"] != part["policy/post_update_kl"]
    assert part["policy/post_update_kl"] == pytest.approx(whole["policy/post_update_kl"], rel=2)


def test_histograms_hold_every_token(model_folder: Path) -> None:
    batch = make_batch(shift=0.1)
    found = train(model_folder, batch).result.histograms
    tokens = sum(int(s.policy_mask.sum()) for s in batch.sequences)
    totals = {name: sum(histogram.counts) for name, histogram in found.items()}
    assert totals == {
        "mismatch/logprob_abs_diff": tokens,
        "mismatch/is_ratio": tokens,
        "policy/token_entropy": tokens,
        "policy/advantage": tokens,
        "policy/response_tokens": len(batch.sequences),
    }
    assert all(len(h.edges) == len(h.counts) + 1 for h in found.values())


def test_a_histogram_clips_into_its_outer_bins_and_leaves_out_what_is_not_finite() -> None:
    values = [np.array([-9.0, 0.0, 0.5, np.nan]), [9.0, 1.0, np.inf]]
    found = step_histograms.bin_values(values, (0.0, 0.5, 1.0))
    assert (found.edges, found.counts) == ((0.0, 0.5, 1.0), (2, 3))
    assert step_histograms.bin_values([], (0.0, 1.0)).counts == (0,)
    for edges in (step_histograms.MAGNITUDES, step_histograms.RATIOS, step_histograms.LENGTHS):
        assert list(edges) == sorted(set(edges))
