"""The loss of demonstrations is torch's cross entropy on the trained tokens, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.types import TrainBatch
from tests.support.tiny_ranks import changed, make_batch, make_trainer, parameters, same_bits


def demonstrations(step: int = 1, **values: object) -> TrainBatch:
    """Random sequences, of which nobody knows who sampled them."""
    batch = make_batch(step=step, groups=4, size=3)
    sequences = tuple(
        replace(each, behaviour_logprobs=np.zeros_like(each.behaviour_logprobs), temperature=1.0)
        for each in batch.sequences
    )
    return changed(replace(batch, sequences=sequences, imitated=True), **values)


def cross_entropy(policy: Policy, batch: TrainBatch) -> Tensor:
    """Torch's own, one sequence at a time; the mean over the trained tokens of the batch."""
    logits: list[Tensor] = []
    targets: list[Tensor] = []
    for each in batch.sequences:
        ids = torch.from_numpy(each.token_ids.astype(np.int64))
        found = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        chosen = torch.from_numpy(each.policy_mask[1:])
        logits.append(found[chosen].float())
        targets.append(ids[1:][chosen])
    return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(targets))


def test_the_loss_is_torchs_cross_entropy_on_the_same_tokens(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    batch = demonstrations()
    with torch.no_grad():
        expected = float(cross_entropy(policy, batch))
    score = trainer.score_batch(batch)
    assert score.loss == pytest.approx(expected, abs=1e-6)
    assert score.tokens == sum(int(each.policy_mask.sum()) for each in batch.sequences)
    result = trainer.train_step(batch, lr=1e-3)
    assert result.metrics["policy/loss"] == pytest.approx(expected, abs=1e-6)
    assert (result.metrics["policy/updates"], result.skipped) == (1.0, False)


def test_the_gradient_is_torchs_too(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    batch = demonstrations()
    cross_entropy(policy, batch).backward()
    found = [p.grad for p in policy.trained_parameters().values() if p.grad is not None]
    expected = float(torch.stack([gradient.double().norm() for gradient in found]).norm())
    for parameter in policy.trained_parameters().values():
        parameter.grad = None
    metrics = trainer.train_step(batch, lr=1e-3).metrics
    assert metrics["policy/grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_a_score_changes_nothing_and_steps_lower_it(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    batch, before = demonstrations(), parameters(policy)
    first = trainer.score_batch(batch)
    assert trainer.score_batch(batch) == first
    assert same_bits(before, parameters(policy))
    for step in range(1, 6):
        trainer.train_step(replace(batch, step=step), lr=1e-2)
    assert trainer.score_batch(batch).loss < first.loss - 0.1


@pytest.mark.parametrize("values", [{"reward": 0.0}, {"reward": 7.0}, {"group_id": "one"}])
def test_rewards_and_groups_of_demonstrations_change_nothing(
    model_folder: Path, values: dict[str, Any]
) -> None:
    losses: list[float] = []
    trained: list[dict[str, Tensor]] = []
    for given in ({}, values):
        policy, _, trainer = make_trainer(model_folder)
        batch = demonstrations(**given)
        losses.append(trainer.train_step(batch, lr=1e-3).metrics["policy/loss"])
        trained.append(parameters(policy))
    assert losses[0] == losses[1] and same_bits(*trained)


def test_nothing_of_the_algorithm_of_rl_reaches_the_loss(model_folder: Path) -> None:
    algorithm = AlgorithmConfig(loss="gspo", entropy_coefficient=0.5, clip_high=0.3)
    losses = [
        make_trainer(model_folder, algorithm=each)[2].train_step(demonstrations(), 1e-3)
        for each in (AlgorithmConfig(), algorithm)
    ]
    one, other = (each.metrics["policy/loss"] for each in losses)
    assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("pack_tokens", [1, 64, 4096])
def test_packs_change_neither_loss_nor_score(model_folder: Path, pack_tokens: int) -> None:
    _, _, whole = make_trainer(model_folder)
    _, _, packed = make_trainer(model_folder, pack_tokens=pack_tokens)
    batch = demonstrations()
    assert packed.score_batch(batch).loss == pytest.approx(whole.score_batch(batch).loss, abs=1e-6)
    losses = [each.train_step(batch, 1e-3).metrics["policy/loss"] for each in (whole, packed)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_adapters_are_trained_alone(model_folder: Path) -> None:
    policy, _, trainer = make_trainer(model_folder, lora=LoraConfig(rank=4))
    batch = demonstrations()
    names = policy.trained_parameters().keys()
    base = {name: value for name, value in parameters(policy).items() if name not in names}
    first = trainer.score_batch(batch).loss
    for step in range(1, 6):
        trainer.train_step(replace(batch, step=step), lr=1e-2)
    assert trainer.score_batch(batch).loss < first
    now = parameters(policy)
    assert base and same_bits(base, {name: now[name] for name in base})
