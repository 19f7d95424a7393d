from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flotilla_common.models.activation_memory import Checkpointing
from flotilla_learner.algo.advantages import ADVANTAGES, BatchRewards
from flotilla_learner.config.algorithm import AlgorithmConfig, CorrectionConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.rows import split_groups
from flotilla_learner.types import TrainBatch
from tests.support.tiny_ranks import (
    make_batch,
    make_trainer,
    parameters,
    reference_logprobs,
    same_bits,
)


def naive_loss(policy: Policy, batch: TrainBatch) -> float:
    """PPO clip, token mean, written down a second time: one sequence at a time, no packs."""
    rewards = BatchRewards(
        [s.group_id for s in batch.sequences],
        [s.attempt_index for s in batch.sequences],
        [s.reward for s in batch.sequences],
        [np.zeros(1)] * len(batch.sequences),
    )
    advantages = ADVANTAGES.get("grpo")(rewards, AlgorithmConfig())
    total, tokens = 0.0, 0
    for sequence, (advantage,) in zip(batch.sequences, advantages, strict=True):
        logprobs = reference_logprobs(policy, sequence.token_ids, sequence.temperature)
        picked = sequence.policy_mask[1:]
        ratio = np.exp(logprobs[picked] - sequence.behaviour_logprobs[1:][picked])
        bounded = np.clip(ratio, 0.8, 1.28)
        total -= float(np.minimum(ratio * advantage, bounded * advantage).sum())
        tokens += int(picked.sum())
    return total / tokens


def test_the_loss_is_that_of_the_plain_formula(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    batch = make_batch(policy, shift=0.3)
    expected = naive_loss(policy, batch)
    result = trainer.train_step(batch, lr=1e-2)
    metrics = result.metrics
    assert metrics["policy/loss"] == pytest.approx(expected, abs=1e-6)
    assert not result.skipped
    assert metrics["policy/lr"] == 1e-2
    assert 0 < metrics["policy/clip_ratio"] < 1
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.24, abs=0.05)


def test_on_the_samplers_own_policy_nothing_mismatches(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    metrics = trainer.train_step(make_batch(policy), lr=1e-3).metrics
    assert metrics["mismatch/logprob_abs_diff_mean"] < 1e-5
    assert metrics["mismatch/kl_train_infer"] < 1e-9
    assert metrics["mismatch/is_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["policy/clip_ratio"] == 0.0


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_the_micro_batch_size_changes_neither_loss_nor_update(
    model_folder: Path, reduction: str
) -> None:
    algorithm = AlgorithmConfig.model_validate({"reduction": reduction})
    outcomes: list[tuple[Mapping[str, float], dict[str, torch.Tensor]]] = []
    for pack_tokens, head_chunk in ((1, 3), (64, 16), (4096, 512)):
        policy, _, trainer = make_trainer(
            model_folder,
            pack_tokens=pack_tokens,
            head_chunk=head_chunk,
            algorithm=algorithm,
            # Adam divides a gradient by its own size, rounding errors too; not with this.
            eps=1.0,
        )
        # A larger rate multiplies rounding errors in what is scored after the update.
        metrics = trainer.train_step(make_batch(policy, shift=0.2), lr=0.1).metrics
        outcomes.append((metrics, parameters(policy)))
    for metrics, values in outcomes[1:]:
        assert metrics == pytest.approx(outcomes[0][0], rel=1e-4, abs=1e-6)
        for name, value in values.items():
            torch.testing.assert_close(value, outcomes[0][1][name], rtol=0, atol=1e-6)


def test_gradient_checkpointing_changes_nothing(model_folder: Path) -> None:
    results: list[dict[str, torch.Tensor]] = []
    choices: tuple[Checkpointing, ...] = ("off", "selective", "full")
    for checkpointing in choices:
        policy, _, trainer = make_trainer(model_folder, checkpointing=checkpointing)
        trainer.train_step(make_batch(policy), lr=1e-3)
        results.append(parameters(policy))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_offloading_the_optimizer_changes_nothing(model_folder: Path) -> None:
    results: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    for offload in (False, True):
        policy, adamw, trainer = make_trainer(model_folder, offload=offload, weight_decay=0.1)
        for step in (1, 2):
            trainer.train_step(make_batch(step=step), lr=1e-3)
        results.append((parameters(policy), adamw.state_tensors()))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


def test_a_better_attempt_becomes_more_likely(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    batch = make_batch(policy, groups=1)
    good = next(s for s in batch.sequences if s.reward == 1.0)
    before = reference_logprobs(policy, good.token_ids, 0.8)[good.policy_mask[1:]].sum()
    trainer.train_step(batch, lr=1e-3)
    after = reference_logprobs(policy, good.token_ids, 0.8)[good.policy_mask[1:]].sum()
    assert after > before


def test_far_off_policy_the_clip_holds_the_policy_where_it_is(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    batch = make_batch(policy, groups=1)
    moved = [
        # Better attempts look far likelier than when sampled, worse ones far less likely.
        replace(s, behaviour_logprobs=s.behaviour_logprobs + (-1.0 if s.reward else 1.0))
        for s in batch.sequences
    ]
    before = parameters(policy)
    metrics = trainer.train_step(TrainBatch(1, tuple(moved)), lr=1e-2).metrics
    assert metrics["policy/clip_ratio"] == 1.0
    assert metrics["policy/grad_norm"] == 0.0
    assert same_bits(before, parameters(policy))


def test_tokens_beyond_the_ratio_limit_are_masked_and_counted(model_folder: Path) -> None:
    algorithm = AlgorithmConfig(correction=CorrectionConfig(token_mask=(1 / 1.2, 1.2)))
    policy, _, trainer = make_trainer(model_folder, algorithm=algorithm)
    metrics = trainer.train_step(make_batch(policy, shift=0.3), lr=1e-3).metrics
    # |N(0, 0.3)| > log 1.2 in 54 % of cases.
    assert metrics["mismatch/masked_fraction"] == pytest.approx(0.54, abs=0.12)


def test_constant_groups_count_in_the_mean_and_move_nothing(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    batch = make_batch(policy)
    constant = replace(batch, sequences=tuple(replace(s, reward=1.0) for s in batch.sequences))
    before = parameters(policy)
    result = trainer.train_step(constant, lr=1e-2)
    assert (result.metrics["policy/updates"], result.metrics["policy/loss"]) == (0.0, 0.0)
    assert not result.skipped
    assert same_bits(before, parameters(policy))
    half = tuple(replace(s, reward=0.0) if s.group_id == "g0" else s for s in batch.sequences)
    mixed = replace(batch, sequences=half)
    expected = naive_loss(policy, mixed)
    metrics = trainer.train_step(mixed, lr=1e-3).metrics
    assert metrics["policy/loss"] == pytest.approx(expected, abs=1e-6)


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(model_folder: Path) -> None:
    policy, adamw, trainer = make_trainer(model_folder)
    trainer.train_step(make_batch(policy), lr=1e-3)
    before, moments = parameters(policy), {k: v.clone() for k, v in adamw.state_tensors().items()}
    batch = make_batch(policy, step=2)
    poisoned = batch.sequences[0].behaviour_logprobs.copy()
    poisoned[batch.sequences[0].policy_mask] = np.nan
    bad = replace(batch.sequences[0], behaviour_logprobs=poisoned)
    assert trainer.train_step(TrainBatch(2, (bad, *batch.sequences[1:])), lr=1e-3).skipped
    assert same_bits(before, parameters(policy))
    assert same_bits(moments, adamw.state_tensors())
    assert not trainer.train_step(batch, lr=1e-3).skipped


def test_epochs_and_mini_batches_make_so_many_updates(model_folder: Path) -> None:
    algorithm = AlgorithmConfig(epochs=2, mini_batches=3)
    policy, _, trainer = make_trainer(model_folder, algorithm=algorithm)
    metrics = trainer.train_step(make_batch(policy), lr=1e-3).metrics
    assert metrics["policy/updates"] == 6.0


def test_mini_batches_hold_whole_groups_in_order() -> None:
    groups = ["g0", "g1", "g0", "g2", "g3", "g2", "g4"]
    assert split_groups(groups, 2) == [[0, 2, 1], [3, 5, 4, 6]]
    assert len(split_groups(groups, 9)) == 5


def test_the_same_state_and_batches_give_the_same_bits(model_folder: Path) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        policy, _, trainer = make_trainer(model_folder)
        for step in (1, 2, 3):
            trainer.train_step(make_batch(step=step), lr=1e-2)
        results.append(parameters(policy))
    assert same_bits(*results)
