"""Values that are not finite are discarded and counted, and change not one bit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.reference import ReferencePolicy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch
from tests.support.tiny_ranks import make_batch, make_trainer, parameters, same_bits

Bits = dict[str, Tensor]
GAE_KL = {"advantage": "gae", "kl": {"coefficient": 0.1}, "critic": {"lr": 1e-3}}


@dataclass
class Rig:
    """A trainer that has made a step already, so that there are moments to lose."""

    policy: Policy
    adamw: Optimizer
    trainer: Trainer

    def bits(self) -> Bits:
        critic = self.trainer.critic
        found = {**parameters(self.policy), **self.adamw.state_tensors()}
        found |= critic.state_tensors() if critic is not None else {}
        return {name: value.clone() for name, value in found.items()}


def rig(folder: Path, **algorithm: object) -> Rig:
    config = AlgorithmConfig.model_validate(algorithm)
    policy, adamw, trainer = make_trainer(folder, algorithm=config)
    assert not trainer.train_step(make_batch(policy), lr=1e-3).skipped
    return Rig(policy, adamw, trainer)


def poisoned(batch: TrainBatch, value: float) -> TrainBatch:
    """One behaviour logprob of the first sequence is `value`."""
    first = batch.sequences[0]
    logprobs = first.behaviour_logprobs.copy()
    logprobs[np.flatnonzero(first.policy_mask)[0]] = value
    return replace(
        batch, sequences=(replace(first, behaviour_logprobs=logprobs), *batch.sequences[1:])
    )


def finite(metrics: dict[str, float]) -> bool:
    return all(np.isfinite(value) for value in metrics.values())


def test_a_loss_that_is_not_finite_changes_neither_policy_nor_critic(model_folder: Path) -> None:
    made = rig(model_folder, **GAE_KL)
    before, batch = made.bits(), make_batch(made.policy, step=2)
    result = made.trainer.train_step(poisoned(batch, np.nan), lr=1e-3)
    assert (result.skipped, result.metrics["policy/skipped"]) == (True, 1.0)
    assert finite(dict(result.metrics))
    assert same_bits(made.bits(), before)
    assert not made.trainer.train_step(batch, lr=1e-3).skipped
    assert not same_bits(made.bits(), before)


def test_only_the_mini_batch_that_holds_it_is_lost(model_folder: Path) -> None:
    made = rig(model_folder, mini_batches=3)
    result = made.trainer.train_step(poisoned(make_batch(made.policy, step=2), np.nan), lr=1e-3)
    assert result.metrics["policy/skipped"] == 1.0
    assert result.metrics["policy/updates"] == 2.0
    assert finite(dict(result.metrics))
    assert np.isfinite(result.versions[1].kl)


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_a_reference_that_is_not_finite_refuses_the_step(
    model_folder: Path, place: str, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig(model_folder, kl={"coefficient": 0.1, "place": place}, mini_batches=2)
    with_reference(made.trainer, lambda head: head.fill_(poison))
    before = made.bits()
    result = made.trainer.train_step(make_batch(made.policy, step=2), lr=1e-3)
    assert (result.skipped, result.metrics["policy/skipped"]) == (True, 2.0)
    assert result.metrics["policy/updates"] == 0.0
    assert same_bits(made.bits(), before)


def with_reference(trainer: Trainer, spoil: Callable[[Tensor], object]) -> None:
    """Spoils the reference's last norm."""
    reference = trainer._preparer.reference  # pyright: ignore[reportPrivateUsage]
    assert isinstance(reference, ReferencePolicy)
    with reference.on_policy_device() as frozen, torch.no_grad():
        spoil(frozen.named_parameters()["model.norm.weight"])


@pytest.mark.parametrize("name", ["head.bias", "body.norm.weight"])
def test_a_critic_that_is_not_finite_refuses_the_step(model_folder: Path, name: str) -> None:
    made = rig(model_folder, **GAE_KL)
    assert made.trainer.critic is not None
    with torch.no_grad():
        made.trainer.critic.named_parameters()[name].fill_(float("nan"))
    before = made.bits()
    result = made.trainer.train_step(make_batch(made.policy, step=2), lr=1e-3)
    assert (result.skipped, result.metrics["policy/updates"]) == (True, 0.0)
    after = made.bits()
    assert all(torch.equal(after[k], before[k]) or before[k].isnan().any() for k in before)


def test_a_gradient_of_the_critic_that_is_not_finite_stops_the_policys_update_too(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig(model_folder, **GAE_KL)
    critic = made.trainer.critic
    assert critic is not None
    bias = critic.named_parameters()["head.bias"]
    hook = bias.register_hook(lambda gradient: gradient * float("inf"))
    before, batch = made.bits(), make_batch(made.policy, step=2)
    result = made.trainer.train_step(batch, lr=1e-3)
    assert (result.skipped, result.metrics["policy/skipped"]) == (True, 1.0)
    assert same_bits(made.bits(), before)
    hook.remove()
    assert not made.trainer.train_step(batch, lr=1e-3).skipped


def test_a_gradient_of_the_policy_that_is_not_finite_stops_the_critics_update_too(
    model_folder: Path,
) -> None:
    made = rig(model_folder, **GAE_KL)
    weight = made.policy.named_parameters()["model.norm.weight"]
    weight.register_hook(lambda gradient: gradient * float("nan"))
    before = made.bits()
    assert made.trainer.train_step(make_batch(made.policy, step=2), lr=1e-3).skipped
    assert same_bits(made.bits(), before)


def test_a_policy_that_is_not_finite_refuses_the_step_that_scores_it_beforehand(
    model_folder: Path,
) -> None:
    made = rig(model_folder, proximal="trainer", epochs=2)
    with torch.no_grad():
        made.policy.named_parameters()["model.norm.weight"].fill_(float("nan"))
    moments = {name: value.clone() for name, value in made.adamw.state_tensors().items()}
    result = made.trainer.train_step(make_batch(step=2), lr=1e-3)
    assert (result.skipped, result.metrics["policy/skipped"]) == (True, 2.0)
    assert same_bits(made.adamw.state_tensors(), moments)
