import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import checkpoint
from flotilla_learner.rank.checkpoint import CheckpointError
from flotilla_learner.rank.checkpoint_writer import CheckpointWriter
from flotilla_learner.rank.model_loading import ModelError
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.tensor_shards import (
    ShardFolder,
    TensorShardError,
    flatten_groups,
    shard_pattern,
)
from flotilla_learner.rank.trainer import Trainer
from tests.support.checkpoints import load_group, write_checkpoint
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_batch, make_trainer, parameters, same_bits


def test_a_resumed_run_equals_the_one_that_was_never_stopped(
    model_folder: Path, tmp_path: Path
) -> None:
    policy, adamw, trainer = make_trainer(model_folder)
    for step in (1, 2):
        trainer.train_step(make_batch(step=step), lr=1e-2)
    write_checkpoint(tmp_path, policy, adamw, 2)
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


def describe_nothing(_: Path) -> list[str]:
    return []


@pytest.fixture
def saved(model_folder: Path, tmp_path: Path) -> Path:
    policy, adamw, trainer = make_trainer(model_folder)
    trainer.train_step(make_batch(), lr=1e-2)
    files = write_checkpoint(tmp_path, policy, adamw, 1)
    assert set(files.sha256) == {path.name for path in tmp_path.iterdir()}
    return tmp_path


def test_it_holds_no_pickle(saved: Path) -> None:
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json"}
    assert load_group(saved, "model")["model.norm.weight"].dtype == torch.float32


def test_what_changes_after_the_copy_is_not_in_it(tmp_path: Path) -> None:
    state = {"counted": torch.zeros(()), "values": torch.zeros(100_000)}
    writer = CheckpointWriter(1, torch.device("cpu"), describe_nothing)
    kept = {name: nn.Parameter(value) for name, value in state.items()}
    # A rank but the first writes nothing that all have whole.
    writer.begin_writing(tmp_path / "second", {"model": kept}, 1)
    assert writer.when_written(lambda files: files.sha256).result() == {}
    first = CheckpointWriter(0, torch.device("cpu"), describe_nothing)
    first.begin_writing(tmp_path / "first", {"model": kept}, 1)
    for value in state.values():
        value.fill_(7)
    first.when_written(lambda files: files).result()
    for value in load_group(tmp_path / "first", "model").values():
        assert not value.any()


def test_a_second_one_while_the_first_is_written_is_refused(tmp_path: Path) -> None:
    go = threading.Event()

    def describe_late(_: Path) -> list[str]:
        assert go.wait(20)
        return []

    writer = CheckpointWriter(0, torch.device("cpu"), describe_late, {"base": None})
    with pytest.raises(CheckpointError, match="no checkpoint was begun"):
        writer.when_written(lambda files: files)
    writer.begin_writing(tmp_path / "1", {}, 1)
    with pytest.raises(CheckpointError, match="is still being written: wait for it"):
        writer.begin_writing(tmp_path / "2", {}, 2)
    go.set()
    writer.when_written(lambda files: files).result()
    writer.begin_writing(tmp_path / "2", {}, 2)
    writer.when_written(lambda files: files).result()
    assert checkpoint.read_step(tmp_path / "2") == 2


def test_a_missing_file_is_found(saved: Path, model_folder: Path) -> None:
    (path,) = saved.glob(shard_pattern(0))
    path.unlink()
    with pytest.raises(ModelError, match=r"has no model/model\.embed_tokens\.weight"):
        load_policy(policy_config(model_folder), RankConfig(), saved)


def test_a_tensor_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    tensors = flatten_groups({"model": {"a": torch.zeros(4, 2)}})
    checkpoint.write_rank_files(tmp_path, tensors, 0)
    checkpoint.write_run_files(tmp_path, describe_nothing, {"model/a": (4, 2)}, step=1)
    folder = ShardFolder(tmp_path)
    for wanted, why in (({"b": torch.zeros(1)}, "has no model/b"), ({"a": torch.zeros(3, 2)}, "")):
        with pytest.raises(TensorShardError, match=why or "Size mismatch"):
            folder.read_group("model", wanted)


def test_optimizer_state_of_another_model_is_refused(saved: Path) -> None:
    other = Optimizer({"weight": nn.Parameter(torch.ones(1))}, OptimizerConfig())
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.load_optimizer(saved, other)
