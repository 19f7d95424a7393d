"""Engines configured differently from the trainer: each is refused, and its fault named."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.guard.diagnosis import diagnose_mismatch
from flotilla_learner.guard.mismatch_limits import BOUNDS, MismatchBound
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.types import (
    Comparison,
    Hypothesis,
    TrainBatch,
    TrainSequence,
    VersionMismatch,
)
from tests.learner.guard.engines import (
    RANK,
    Trainer,
    in_dtype,
    sampled,
    with_experts_laid_out_otherwise,
    with_other_head,
)
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import YARN, write_sparse_model


@pytest.fixture
def trainer(untied_folder: Path, tmp_path: Path) -> Generator[Trainer]:
    made = Trainer.of(untied_folder, tmp_path)
    yield made
    made.slots.unlink_slots()


@pytest.fixture
def stretched(untied_folder: Path, tmp_path: Path) -> Generator[Trainer]:
    """A trainer with YaRN: sequences extend beyond the 64 positions of the model's own context."""
    made = Trainer.of(untied_folder, tmp_path, rope_scaling=YARN)
    yield made
    made.slots.unlink_slots()


def agrees(trainer: Trainer, bound: MismatchBound) -> None:
    found = trainer.judged(sampled(trainer.policy)).versions[0]
    assert not bound.find_excesses(0, found)
    assert found.tokens > 500


def test_an_engine_that_computes_as_the_trainer_does_agrees(trainer: Trainer) -> None:
    agrees(trainer, BOUNDS["float32"])


def test_with_yarn_both_agree_beyond_the_original_context(stretched: Trainer) -> None:
    comparison = stretched.judged(sampled(stretched.policy))
    near, far = comparison.bands
    assert (near.end, far.start) == (64, 64)
    assert max(near.abs_diff, far.abs_diff) < BOUNDS["float32"].mean
    agrees(stretched, BOUNDS["float32"])


@pytest.mark.parametrize("engine", [1.0, 0.6])
def test_an_engine_at_another_temperature_is_named(trainer: Trainer, engine: float) -> None:
    diagnosis = trainer.diagnosis(sampled(trainer.policy, temperature=engine))
    assert diagnosis.setting == "temperature"
    assert f"those of {engine:g}, learner.temperature is 0.8" in diagnosis.sentence
    assert "processed_logprobs" in diagnosis.fix


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_of_another_dtype_is_named(trainer: Trainer, dtype: torch.dtype) -> None:
    diagnosis = trainer.diagnosis(sampled(in_dtype(trainer.policy, dtype)))
    assert diagnosis.setting == "dtype"
    name = str(dtype).removeprefix("torch.")
    assert f"computing in {name} makes it, policy.dtype is float32" in diagnosis.sentence


def test_an_engine_may_round_less_than_the_trainer_in_the_same_dtype_but_not_much_more() -> None:
    """The numbers of vLLM in bfloat16 on a processor whose kernels add up in float32."""
    found = VersionMismatch(130, kl=0.0009, abs_diff=0.0328, abs_diff_tail=0.1, abs_diff_max=0.1)
    tried = (
        Hypothesis("dtype", "bfloat16", residual=0.099, effect=0.0962),
        Hypothesis("dtype", "float16", residual=0.036, effect=0.0117),
    )
    policy = PolicyConfig(model="m", dtype="float32", max_model_len=128)
    comparison = Comparison({0: found}, hypotheses=tried)
    named = diagnose_mismatch(found, comparison, policy, 1.0)
    assert "computing in bfloat16 makes it" in named.sentence
    # Three times what even bfloat16 explains is something else.
    coarse = replace(found, abs_diff=0.3)
    assert diagnose_mismatch(coarse, comparison, policy, 1.0).setting is None


def test_an_engine_without_the_rope_scaling_is_named(
    stretched: Trainer, untied_folder: Path
) -> None:
    plain = load_policy(policy_config(untied_folder), RANK)
    diagnosis = stretched.diagnosis(sampled(plain))
    assert diagnosis.setting == "rope"
    assert "without policy.rope_scaling" in diagnosis.sentence
    assert "before position 64" in diagnosis.sentence


def test_an_engine_with_another_rope_base_is_named(trainer: Trainer, untied_folder: Path) -> None:
    other = load_policy(policy_config(untied_folder), RANK)
    other.model.load_state_dict(trainer.policy.model.state_dict())
    rotary = other.model.model.rotary_emb
    rotary.config.rope_parameters = {**rotary.config.rope_parameters, "rope_theta": 1e6}
    other.model.model.rotary_emb = type(rotary)(rotary.config)
    diagnosis = trainer.diagnosis(sampled(other))
    assert diagnosis.setting == "rope"
    assert "with rope_theta = 1000000" in diagnosis.sentence


def test_an_engine_with_a_head_of_its_own_folder_is_named(
    trainer: Trainer, untied_folder: Path
) -> None:
    updated(trainer)
    diagnosis = trainer.diagnosis(
        sampled(with_other_head(trainer.policy, untied_folder), version=1)
    )
    assert diagnosis.setting == "head"
    assert "version 0" in diagnosis.sentence or "policy.model" in diagnosis.sentence


def test_an_engine_that_serves_the_version_before_is_named(trainer: Trainer) -> None:
    before = load_policy(trainer.config, RANK)
    updated(trainer)
    diagnosis = trainer.diagnosis(sampled(before, version=1))
    assert diagnosis.setting == "weights"


def test_an_engine_that_an_update_reached_but_for_one_layer_is_named_with_it(
    trainer: Trainer,
) -> None:
    engine = load_policy(trainer.config, RANK)
    updated(trainer)
    stale = "model.layers.1."
    own = engine.named_parameters()
    for name, parameter in trainer.policy.named_parameters().items():
        if not name.startswith(stale):
            own[name].data = parameter.data
    diagnosis = trainer.diagnosis(sampled(engine, version=1))
    assert diagnosis.setting == "weights"
    assert "new but for model.layers.1, that of version 0" in diagnosis.sentence


def test_samples_of_an_older_version_are_judged_by_its_own_weights(trainer: Trainer) -> None:
    """A stale sample differs from the newest policy, and that is no mismatch."""
    old = sampled(trainer.policy)
    updated(trainer)
    stale = TrainBatch(2, tuple(_aged(s) for s in old.sequences))
    own = trainer.comparing.run_comparison(stale, 1, diagnose=False).versions
    assert list(own) == [0]
    assert not BOUNDS["float32"].find_excesses(0, own[0])
    fresh = trainer.comparing.run_comparison(
        TrainBatch(2, old.sequences), 1, diagnose=False
    ).versions
    assert BOUNDS["float32"].find_excesses(1, fresh[1]), "the update changed too little"


def test_samples_of_weights_that_are_gone_are_left_out(trainer: Trainer) -> None:
    old = sampled(trainer.policy)
    for version in (1, 2, 3):
        updated(trainer, version)
    stale = TrainBatch(4, tuple(_aged(s, 3) for s in old.sequences))
    found = trainer.comparing.run_comparison(stale, 3, diagnose=False)
    assert (found.versions, set(found.sequences), found.bands) == ({}, {None}, ())


def test_comparing_leaves_the_model_as_it_was(trainer: Trainer) -> None:
    updated(trainer)
    before = {n: p.detach().clone() for n, p in trainer.policy.named_parameters().items()}
    batch = sampled(trainer.policy, version=1)
    rows = (*batch.sequences[:4], *(_aged(s) for s in batch.sequences[4:]))
    trainer.comparing.run_comparison(TrainBatch(2, rows), 1, diagnose=True)
    for name, parameter in trainer.policy.named_parameters().items():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_what_nothing_explains_is_reported_so(trainer: Trainer) -> None:
    batch = sampled(trainer.policy)
    rng = np.random.default_rng(0)
    for sequence in batch.sequences:
        noise = rng.normal(0, 0.5, len(sequence.token_ids)).astype(np.float32)
        sequence.behaviour_logprobs[sequence.policy_mask] += noise[sequence.policy_mask]
    diagnosis = trainer.diagnosis(batch)
    assert diagnosis.setting is None
    assert "no single setting explains it" in diagnosis.sentence
    assert "expert" not in diagnosis.sentence + diagnosis.fix


def test_the_layout_of_experts_is_named_where_nothing_explains_a_model_that_has_some(
    tmp_path: Path,
) -> None:
    trainer = Trainer.of(write_sparse_model(tmp_path / "model"), tmp_path)
    diagnosis = trainer.diagnosis(sampled(with_experts_laid_out_otherwise(trainer.policy)))
    trainer.slots.unlink_slots()
    assert diagnosis.setting is None
    assert "no single setting explains it" in diagnosis.sentence
    assert "MoE expert layout" in diagnosis.sentence
    assert "rollout.engine.options.moe_backend" in diagnosis.fix


@torch.no_grad()
def updated(trainer: Trainer, version: int = 1) -> None:
    """A next version, as far from the one before as a large step takes it."""
    torch.manual_seed(version)
    for parameter in trainer.policy.named_parameters().values():
        parameter.add_(0.05 * torch.randn_like(parameter))
    trainer.slots.write_version(version)


def _aged(sequence: TrainSequence, staleness: int = 1) -> TrainSequence:
    return replace(sequence, staleness=staleness)
