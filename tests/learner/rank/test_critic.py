"""The critic of advantage = "gae": what it learns, and that nothing of it is lost."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flotilla_common.models.activation_memory import Checkpointing
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.checkpoint import CheckpointError, load_critic_parameters
from flotilla_learner.rank.critic import Critic
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.rank_setup import RankModels, RankSetup, load_models
from flotilla_learner.types import Histogram, StepResult, TrainBatch
from tests.support.checkpoints import write_checkpoint, write_models
from tests.support.rank_configs import ALONE, policy_config
from tests.support.tiny_ranks import make_batch, make_trainer, only, parameters, same_bits


def gae(**critic: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantage": "gae", "critic": {"lr": 1e-3, **critic}})


def state(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in critic.state_tensors().items()}


def run(
    folder: Path, steps: int = 1, *, policy_lr: float = 1e-3, epochs: int = 1, **critic: object
) -> tuple[list[StepResult], Policy, Critic]:
    config = gae(**critic).model_copy(update={"epochs": epochs})
    policy, _, trainer = make_trainer(folder, algorithm=config)
    batch = make_batch(policy)
    results = [trainer.train_step(replace(batch, step=n), policy_lr) for n in range(1, steps + 1)]
    assert trainer.critic is not None
    return results, policy, trainer.critic


def different(histogram: Histogram) -> int:
    """Return how many of its bins hold anything."""
    return sum(count > 0 for count in histogram.counts)


def test_it_begins_with_the_policys_body_and_no_opinion(model_folder: Path) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    critic = Critic(policy, gae().critic, OptimizerConfig())
    found = critic.named_parameters()
    for name, parameter in dict(policy.model.base_model.named_parameters()).items():
        assert torch.equal(found[f"body.{name}"], parameter)
        assert found[f"body.{name}"] is not parameter
    assert torch.count_nonzero(found["head.weight"]) == torch.count_nonzero(found["head.bias"]) == 0


def test_it_learns_what_the_batch_returned_the_sooner_the_higher_its_rate(
    model_folder: Path,
) -> None:
    slow, fast = (run(model_folder, 6, policy_lr=1e-9, lr=rate)[0] for rate in (1e-5, 3e-3))
    assert slow[0].metrics["policy/value_loss"] == fast[0].metrics["policy/value_loss"]
    assert fast[-1].metrics["policy/value_loss"] < 0.7 * fast[0].metrics["policy/value_loss"]
    assert fast[-1].metrics["policy/value_loss"] < slow[-1].metrics["policy/value_loss"]
    assert fast[0].metrics["policy/value_explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert fast[-1].metrics["policy/value_explained_variance"] > 0.2
    assert fast[0].metrics["policy/value_grad_norm"] > 0


@pytest.mark.parametrize("key", ["discount", "trace_decay"])
def test_with_less_of_it_early_tokens_get_less_of_the_reward(model_folder: Path, key: str) -> None:
    """Without an opinion of the critic all tokens of an attempt get its reward at 1."""
    whole, (fading, *_) = (run(model_folder, **only(key, value))[0] for value in (1.0, 0.8))
    assert different(whole[0].histograms["policy/advantage"]) == 2
    assert different(fading.histograms["policy/advantage"]) > 5


def test_values_are_held_near_those_before_the_step(model_folder: Path) -> None:
    tight, wide = (
        run(model_folder, 2, policy_lr=1e-9, epochs=6, value_clip=clip, lr=1e-2)[0]
        for clip in (0.01, 10.0)
    )
    assert tight[0].metrics["policy/value_clip_ratio"] > 0
    assert wide[0].metrics["policy/value_clip_ratio"] == 0
    assert tight[1].metrics["policy/value_loss"] > wide[1].metrics["policy/value_loss"]


def test_in_the_warm_up_the_critic_alone_learns(model_folder: Path) -> None:
    policy, adamw, trainer = make_trainer(model_folder, algorithm=gae(warmup_steps=1))
    before, batch = parameters(policy), make_batch(policy)
    assert trainer.critic is not None
    fresh = state(trainer.critic)
    first = trainer.train_step(batch, lr=1e-3)
    assert (first.metrics["policy/updates"], first.skipped) == (0.0, False)
    assert same_bits(parameters(policy), before)
    assert adamw.state_tensors() == {}
    assert not same_bits(state(trainer.critic), fresh)
    second = trainer.train_step(replace(batch, step=2), lr=1e-3)
    assert second.metrics["policy/updates"] == 1.0
    assert not same_bits(parameters(policy), before)


@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_packs_change_nothing(model_folder: Path, checkpointing: Checkpointing) -> None:
    results: list[StepResult] = []
    for pack_tokens in (1, 256):
        policy, _, trainer = make_trainer(
            model_folder, algorithm=gae(), pack_tokens=pack_tokens, checkpointing=checkpointing
        )
        results.append(trainer.train_step(make_batch(policy), lr=1e-3))
    for name in ("policy/loss", "policy/value_loss", "policy/value_grad_norm"):
        assert results[0].metrics[name] == pytest.approx(
            results[1].metrics[name], rel=1e-4, abs=1e-6
        )


def setup(folder: Path, tmp_path: Path, source: Path | None, *, offload: bool = False) -> RankSetup:
    return RankSetup.model_validate(
        {
            "name": "run",
            "shm_dir": tmp_path,
            "total_steps": 9,
            "policy": policy_config(folder),
            "algorithm": gae(lr=1e-2).model_copy(update={"epochs": 2, "mini_batches": 2}),
            "optimizer": OptimizerConfig(lr=1e-2),
            "rank": RankConfig(pack_tokens=256, head_chunk=16, offload_optimizer=offload),
            "checkpoint": source,
            "place": ALONE,
        }
    )


def everything(models: RankModels) -> dict[str, torch.Tensor]:
    assert models.critic is not None
    return {**parameters(models.policy), **models.optimizer.state_tensors(), **state(models.critic)}


@pytest.mark.parametrize("offload", [False, True])
def test_a_resumed_run_equals_the_one_that_was_never_stopped_critic_included(
    model_folder: Path, tmp_path: Path, offload: bool
) -> None:
    straight = load_models(setup(model_folder, tmp_path, None, offload=offload))
    batches: list[TrainBatch] = [make_batch(step=step) for step in (1, 2, 3)]
    straight.trainer.train_step(batches[0], lr=1e-2)
    write_models(tmp_path / "checkpoint", straight, 1)
    source = tmp_path / "checkpoint"
    resumed = load_models(setup(model_folder, tmp_path, source, offload=offload))
    assert same_bits(everything(resumed), everything(straight))
    for batch in batches[1:]:
        ours, theirs = (m.trainer.train_step(batch, lr=1e-2) for m in (straight, resumed))
        assert replace(ours, seconds=0.0) == replace(theirs, seconds=0.0)
    assert same_bits(everything(resumed), everything(straight))


def test_a_checkpoint_of_a_run_without_a_critic_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    policy, adamw, trainer = make_trainer(model_folder)
    trainer.train_step(make_batch(policy), lr=1e-2)
    write_checkpoint(tmp_path / "checkpoint", policy, adamw, 1)
    with pytest.raises(CheckpointError, match=r"has no critic: .*started without one"):
        load_models(setup(model_folder, tmp_path, tmp_path / "checkpoint"))


@pytest.mark.parametrize("change", ["more", "fewer", "wider"])
def test_the_state_of_another_critic_is_refused(
    model_folder: Path, tmp_path: Path, change: str
) -> None:
    models = load_models(setup(model_folder, tmp_path, None))
    write_models(tmp_path / "checkpoint", models, 1)
    assert models.critic is not None
    own = {
        name: torch.zeros(value.shape) for name, value in models.critic.named_parameters().items()
    }
    if change == "fewer":
        del own["head.bias"]
    else:
        own["head.more" if change == "more" else "head.bias"] = torch.zeros(2)
    why = "Size mismatch" if change == "wider" else "the critic's state belongs to another model"
    with pytest.raises(CheckpointError, match=why):
        load_critic_parameters(tmp_path / "checkpoint", own)
