"""The numbers that a step hands out are those that it trained with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.ranks import protocol
from flotilla_learner.types import Standing, StepTokens, TrainBatch
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_batch, make_trainer, reference_logprobs


def tokens_of(folder: Path, batch: TrainBatch, **algorithm: object) -> StepTokens:
    config = AlgorithmConfig.model_validate(algorithm)
    _, _, trainer = make_trainer(folder, algorithm=config)
    tokens = trainer.train_step(batch, lr=1e-2).tokens
    assert tokens is not None
    return tokens


def with_equal_rewards(batch: TrainBatch, group: str) -> TrainBatch:
    sequences = (replace(s, reward=1.0) if s.group_id == group else s for s in batch.sequences)
    return replace(batch, sequences=tuple(sequences))


@pytest.mark.parametrize("proximal", ["behaviour", "trainer"])
def test_logprobs_are_those_of_the_policy_as_the_step_began(
    model_folder: Path, proximal: str
) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    batch = make_batch(policy, shift=0.1)
    tokens = tokens_of(model_folder, batch, proximal=proximal)
    for sequence, logprobs, entropy in zip(
        batch.sequences, tokens.logprobs, tokens.entropy, strict=True
    ):
        expected = reference_logprobs(policy, sequence.token_ids, sequence.temperature)
        mask = sequence.policy_mask[1:]
        np.testing.assert_allclose(logprobs, expected[mask], atol=1e-5)
        assert len(entropy) == mask.sum() and (entropy > 0).all()


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_weights_are_those_of_the_corrections_and_0_where_these_mask(
    model_folder: Path, mini_batches: int
) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    batch = make_batch(policy, shift=0.5)
    correction = {"token_tis": 1.05, "token_mask": [0.7, 1.4]}
    algorithm = {"proximal": "trainer", "correction": correction, "mini_batches": mini_batches}
    tokens = tokens_of(model_folder, batch, **algorithm)
    masked = 0
    for sequence, weights in zip(batch.sequences, tokens.corrections, strict=True):
        expected = reference_logprobs(policy, sequence.token_ids, sequence.temperature)
        sampled = sequence.behaviour_logprobs[sequence.policy_mask]
        ratios = np.exp(expected[sequence.policy_mask[1:]] - sampled)
        kept = (ratios >= 0.7) & (ratios <= 1.4)
        np.testing.assert_allclose(weights, np.where(kept, np.minimum(ratios, 1.05), 0), atol=1e-4)
        masked += int((~kept).sum())
    assert masked, "nothing was masked: the test shows nothing"


def test_advantages_are_those_of_each_group(model_folder: Path) -> None:
    batch = make_batch()
    tokens = tokens_of(model_folder, batch, advantage="grpo")
    for index, (sequence, advantages) in enumerate(
        zip(batch.sequences, tokens.advantages, strict=True)
    ):
        rewards = [s.reward for s in batch.sequences if s.group_id == sequence.group_id]
        assert len(advantages) == sequence.policy_mask.sum()
        assert np.ptp(advantages) == 0
        assert np.sign(advantages[0]) == np.sign(sequence.reward - np.mean(rewards)), index


def test_a_group_without_signal_has_advantages_of_0_and_no_logprobs(model_folder: Path) -> None:
    batch = with_equal_rewards(make_batch(), "g1")
    tokens = tokens_of(model_folder, batch)
    for index, sequence in enumerate(batch.sequences):
        known = ~np.isnan(tokens.logprobs[index])
        if sequence.group_id == "g1":
            assert tokens.standings[index] is Standing.NO_SIGNAL
            assert not known.any() and not tokens.advantages[index].any()
        else:
            assert tokens.standings[index] is Standing.TRAINED and known.all()


def test_an_overlong_sequence_is_left_out(model_folder: Path) -> None:
    batch = make_batch()
    limit = sorted(len(s.token_ids) for s in batch.sequences)[5]
    tokens = tokens_of(model_folder, batch, overlong={"mask_above_tokens": limit})
    for standing, sequence in zip(tokens.standings, batch.sequences, strict=True):
        assert (standing is Standing.LEFT_OUT) == (len(sequence.token_ids) > limit)


def test_numbers_come_back_from_their_file_to_the_bit(model_folder: Path, tmp_path: Path) -> None:
    tokens = tokens_of(model_folder, with_equal_rewards(make_batch(), "g0"))
    path = protocol.token_path(tmp_path, "run", 1)
    protocol.write_tokens(path, tokens)
    found = protocol.read_tokens(path)
    assert found.standings == tokens.standings
    for name in ("advantages", "logprobs", "entropy"):
        for one, other in zip(getattr(found, name), getattr(tokens, name), strict=True):
            np.testing.assert_array_equal(one, other)


def test_unread_numbers_are_removed_with_other_stale_files(tmp_path: Path) -> None:
    stale = protocol.token_path(tmp_path, "run[1]", 7)
    foreign = protocol.token_path(tmp_path, "run1", 7)
    for path in (stale, foreign):
        path.touch()
    protocol.remove_stale_files(tmp_path, "run[1]")
    assert list(tmp_path.iterdir()) == [foreign]
