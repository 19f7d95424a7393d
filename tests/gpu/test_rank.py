"""The training rank on a GPU: the same numbers as on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flotilla_common.tensors.tensor_checksum import checksum64
from flotilla_common.weights import fingerprint as reference
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.model import score_tokens
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.reference import ReferencePolicy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.rank.weight_slots import WeightSlots
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import VOCAB, make_batch, make_trainer, parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_is_that_of_the_cpu(model_folder: Path, offload: bool) -> None:
    expected_policy, _, expected = make_trainer(model_folder, eps=1.0)
    rank = RankConfig(device="cuda", pack_tokens=256, head_chunk=16, gradient_checkpointing="full")
    policy = load_policy(policy_config(model_folder), rank)
    adamw = Optimizer(policy.named_parameters(), OptimizerConfig(lr=1.0, eps=1.0), offload=offload)
    trainer = Trainer(policy, adamw, AlgorithmConfig(), rank)
    assert policy.packable
    ours = trainer.train_step(make_batch(), lr=1.0)
    theirs = expected.train_step(make_batch(), lr=1.0)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-3, abs=1e-5)
    for name, value in parameters(expected_policy).items():
        torch.testing.assert_close(parameters(policy)[name].cpu(), value, rtol=0, atol=1e-4)


def test_a_reference_and_a_critic_are_those_of_the_cpu(model_folder: Path) -> None:
    chosen = {"advantage": "gae", "kl": {"coefficient": 0.1}, "critic": {"lr": 1e-3}, "epochs": 2}
    algorithm = AlgorithmConfig.model_validate(chosen)
    _, _, expected = make_trainer(model_folder, algorithm=algorithm, eps=1.0)
    rank = RankConfig(device="cuda", pack_tokens=256, head_chunk=16, offload_reference=True)
    policy = load_policy(policy_config(model_folder), rank)
    adamw = Optimizer(policy.named_parameters(), OptimizerConfig(lr=1.0, eps=1.0))
    reference = ReferencePolicy.from_config(
        policy_config(model_folder), policy, offload=rank.offload_reference
    )
    trainer = Trainer(policy, adamw, algorithm, rank, reference=reference)
    for step in (1, 2):
        ours = trainer.train_step(make_batch(step=step), lr=1.0)
        theirs = expected.train_step(make_batch(step=step), lr=1.0)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-2, abs=1e-4)
    with reference.on_policy_device() as frozen:
        assert frozen.head.device.type == "cuda"
    assert frozen.head.device.type == "cpu"


def test_bfloat16_is_near_float32_and_published_as_it_is_used(
    model_folder: Path, tmp_path: Path
) -> None:
    ids = canary_token_ids(VOCAB)
    rank = RankConfig(device="cuda")
    policy = load_policy(policy_config(model_folder, dtype="bfloat16"), rank)
    exact = score_tokens(load_policy(policy_config(model_folder), RankConfig()), ids, chunk=32)
    assert np.abs(score_tokens(policy, ids, chunk=32) - exact).max() < 0.3
    slots = WeightSlots(policy.named_parameters(), torch.bfloat16, tmp_path, "run")
    path, digest, manifest = slots.write_version(0)
    raw = np.fromfile(path, np.uint8)
    for entry in manifest:
        part = raw[entry.offset_bytes :][: 2 * int(np.prod(entry.shape))]
        assert reference.checksum64(part) == entry.checksum
    assert reference.compute_fingerprint(manifest, slots.total_bytes) == digest


@pytest.mark.parametrize("count", [0, 1, 8, 1003, 5 * 2**20])
def test_the_checksum_is_that_of_the_numpy_reference(count: int) -> None:
    data = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    assert checksum64(torch.from_numpy(data).cuda()) == reference.checksum64(data)
