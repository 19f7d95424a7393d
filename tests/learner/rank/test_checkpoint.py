from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.learner.config.algorithm import AlgorithmConfig
from services.learner.config.learner import OptimizerConfig
from services.learner.config.rank import RankConfig
from services.learner.rank import checkpoint
from services.learner.rank.checkpoint import CheckpointError
from services.learner.rank.model import load_policy
from services.learner.rank.optimizer import Optimizer
from services.learner.rank.trainer import Trainer
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_batch, make_trainer, parameters, same_bits


def test_a_resumed_run_equals_the_one_that_was_never_stopped(
    model_folder: Path, tmp_path: Path
) -> None:
    policy, adamw, trainer = make_trainer(model_folder)
    for step in (1, 2):
        trainer.train_step(make_batch(step=step), lr=1e-2)
    checkpoint.save_checkpoint(tmp_path, policy, adamw, 2)
    rank = RankConfig(pack_tokens=256, head_chunk=16)
    resumed = load_policy(policy_config(model_folder), rank, tmp_path)
    other = Optimizer(resumed.named_parameters(), OptimizerConfig(lr=1e-2))
    checkpoint.load_optimizer(tmp_path, other)
    assert checkpoint.read_step(tmp_path) == 2
    assert same_bits(parameters(resumed), parameters(policy))
    assert same_bits(other.state_tensors(), adamw.state_tensors())
    successor = Trainer(resumed, other, AlgorithmConfig(), rank)
    for step in (3, 4):
        ours = trainer.train_step(make_batch(step=step), lr=1e-2)
        theirs = successor.train_step(make_batch(step=step), lr=1e-2)
        assert replace(ours, seconds=0.0) == replace(theirs, seconds=0.0)
    assert same_bits(parameters(resumed), parameters(policy))
    assert same_bits(other.state_tensors(), adamw.state_tensors())


@pytest.fixture
def saved(model_folder: Path, tmp_path: Path) -> Path:
    policy, adamw, trainer = make_trainer(model_folder)
    trainer.train_step(make_batch(), lr=1e-2)
    files = checkpoint.save_checkpoint(tmp_path, policy, adamw, 1)
    assert set(files.sha256) == {path.name for path in tmp_path.iterdir()}
    return tmp_path


def test_it_holds_no_pickle(saved: Path) -> None:
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json"}
    assert load_file(saved / "model.safetensors")["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
def test_a_changed_byte_is_found(saved: Path, name: str) -> None:
    data = bytearray((saved / name).read_bytes())
    data[-1] ^= 1
    (saved / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is not what was written"):
        checkpoint.read_step(saved)


def test_a_missing_file_is_found(saved: Path) -> None:
    (saved / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        checkpoint.read_step(saved)


def test_optimizer_state_of_another_model_is_refused(saved: Path) -> None:
    other = Optimizer({"weight": torch.nn.Parameter(torch.ones(1))}, OptimizerConfig())
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoint.load_optimizer(saved, other)
