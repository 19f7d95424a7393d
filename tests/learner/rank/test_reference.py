"""The KL penalty, the reference policy that it measures from, and where that comes from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.rank_setup import RankSetup, load_models
from flotilla_learner.rank.reference import ReferencePolicy
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.scoring import score_rows
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import StepResult
from tests.support.checkpoints import write_models
from tests.support.rank_configs import ALONE, policy_config
from tests.support.tiny_ranks import (
    changed,
    gain,
    make_batch,
    parameters,
    reference_logprobs,
    same_bits,
    train,
)

RANK = RankConfig(pack_tokens=256, head_chunk=16)


def drifted(folder: Path, dtype: str = "float32") -> tuple[Policy, ReferencePolicy]:
    """A policy that has left its reference, the initial one."""
    policy = load_policy(policy_config(folder, dtype=dtype), RANK)
    reference = ReferencePolicy.from_config(
        policy_config(folder, dtype=dtype), policy, offload=True
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.named_parameters().values():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return policy, reference


def kl_steps(folder: Path, steps: int, **algorithm: object) -> list[StepResult]:
    """Return the results of steps of a policy that has drifted, on groups whose rewards are all
    equal."""
    policy, reference = drifted(folder)
    adamw = Optimizer(policy.named_parameters(), OptimizerConfig())
    config = AlgorithmConfig.model_validate(algorithm)
    trainer = Trainer(policy, adamw, config, RANK, reference=reference)
    equal = changed(make_batch(policy), reward=1.0)
    return [trainer.train_step(replace(equal, step=n), lr=1e-3) for n in range(1, steps + 1)]


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_a_kl_in_the_loss_pulls_the_policy_back(model_folder: Path, estimator: str) -> None:
    kl = {"coefficient": 1.0, "estimator": estimator}
    first, *_, last = kl_steps(model_folder, 4, kl=kl)
    assert 0 < last.metrics["policy/kl"] < 0.8 * first.metrics["policy/kl"]
    assert first.metrics["policy/grad_norm"] > 0


ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(-d) - 1 + d,
    "abs": np.abs,
}


@pytest.mark.parametrize("estimator", list(ESTIMATES))
def test_a_kl_in_the_reward_makes_what_left_the_reference_furthest_less_likely(
    model_folder: Path, estimator: str
) -> None:
    policy, reference = drifted(model_folder)
    before = load_policy(policy_config(model_folder), RANK)
    before.model.load_state_dict(policy.model.state_dict())
    batch = changed(make_batch(policy, groups=1), reward=1.0)
    penalties: list[float] = []
    with reference.on_policy_device() as frozen:
        for s in batch.sequences:
            own, fixed = (reference_logprobs(p, s.token_ids, 0.8) for p in (policy, frozen))
            difference = (own - fixed)[s.policy_mask[1:]]
            penalties.append(float(ESTIMATES[estimator](difference).sum()))
    kl = {"coefficient": 0.1, "estimator": estimator, "place": "reward"}
    config = AlgorithmConfig.model_validate({"kl": kl, "advantage": "dr_grpo"})
    adamw = Optimizer(policy.named_parameters(), OptimizerConfig())
    Trainer(policy, adamw, config, RANK, reference=reference).train_step(batch, lr=1e-3)
    order = np.argsort(penalties)
    gains = [gain(policy, before, batch.sequences[i]) for i in order]
    assert gains[0] > 0 > gains[-1]


def test_estimators_and_places_are_all_different(model_folder: Path) -> None:
    norms = {
        (estimator, place): round(
            kl_steps(
                model_folder, 1, kl={"coefficient": 0.1, "estimator": estimator, "place": place}
            )[0].metrics["policy/grad_norm"],
            6,
        )
        for estimator in ("k1", "k2", "k3", "abs")
        for place in ("loss", "reward")
    }
    assert len(set(norms.values())) == len(norms)


def test_a_larger_coefficient_pulls_harder(model_folder: Path) -> None:
    soft, hard = (
        kl_steps(model_folder, 1, kl={"coefficient": c})[0].metrics["policy/grad_norm"]
        for c in (0.5, 1.0)
    )
    assert hard == pytest.approx(2 * soft, rel=1e-4)


def test_without_a_coefficient_there_is_no_reference_and_no_figure_of_it(
    model_folder: Path,
) -> None:
    assert "policy/kl" not in train(model_folder, make_batch()).metrics
    assert train(model_folder, make_batch(), kl={"coefficient": 0.1}).metrics["policy/kl"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_bit_for_bit_the_initial_policy(model_folder: Path, dtype: str) -> None:
    config = policy_config(model_folder, dtype=dtype)
    policy = load_policy(config, RANK)
    reference = ReferencePolicy.from_config(config, policy, offload=True)
    packer = RowPacker(policy, 256, Replicas())
    rows = [Row.from_sequence(i, s) for i, s in enumerate(make_batch().sequences)]
    own = score_rows(policy, rows, packer, chunk=16)
    with reference.on_policy_device() as frozen:
        found = score_rows(frozen, rows, packer, chunk=16)
        kept = frozen.named_parameters()
    for index, logprobs in own.items():
        np.testing.assert_array_equal(found[index], logprobs)
    assert kept["model.layers.0.mlp.up_proj.weight"].dtype == policy.compute_dtype
    assert not any(parameter.requires_grad for parameter in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_goes_by_the_name_of_the_first_publication(
    model_folder: Path, tmp_path: Path, dtype: str
) -> None:
    config = policy_config(model_folder, dtype=dtype)
    policy = load_policy(config, RANK)
    slots = WeightSlots(policy.named_parameters(), policy.compute_dtype, tmp_path, "run")
    reference = ReferencePolicy.from_config(config, policy, offload=True)
    assert reference.weights_fingerprint() == slots.write_version(0)[1]


def test_a_run_that_resumes_measures_from_where_it_began(
    model_folder: Path, tmp_path: Path
) -> None:
    straight = load_models(setup(model_folder, tmp_path, None))
    batch = make_batch()
    straight.trainer.train_step(batch, lr=1e-2)
    write_models(tmp_path / "checkpoint", straight, 1)
    resumed = load_models(setup(model_folder, tmp_path, tmp_path / "checkpoint"))
    assert straight.reference is not None
    assert resumed.reference is not None
    assert resumed.reference.weights_fingerprint() == straight.reference.weights_fingerprint()
    ours, theirs = (
        models.trainer.train_step(replace(batch, step=2), lr=1e-2) for models in (straight, resumed)
    )
    assert ours.metrics == theirs.metrics
    assert ours.metrics["policy/kl"] > 0
    assert same_bits(parameters(straight.policy), parameters(resumed.policy))


def setup(folder: Path, tmp_path: Path, source: Path | None) -> RankSetup:
    return RankSetup.model_validate(
        {
            "name": "run",
            "shm_dir": tmp_path,
            "total_steps": 9,
            "policy": policy_config(folder),
            "algorithm": {"kl": {"coefficient": 0.1}},
            "optimizer": OptimizerConfig(),
            "rank": RANK,
            "checkpoint": source,
            "place": ALONE,
        }
    )


def test_a_step_leaves_the_reference_as_it_was(model_folder: Path) -> None:
    policy = load_policy(policy_config(model_folder), RANK)
    adamw = Optimizer(policy.named_parameters(), OptimizerConfig())
    reference = ReferencePolicy.copy_of(policy, offload=True)
    with reference.on_policy_device() as frozen:
        before = parameters(frozen)
    config = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1}})
    Trainer(policy, adamw, config, RANK, reference=reference).train_step(make_batch(), lr=1e-2)
    with reference.on_policy_device() as frozen:
        assert same_bits(parameters(frozen), before)
    assert not same_bits(parameters(policy), before)
