"""Activations that wait in host memory: the same bits, and nothing but the blocks' inputs goes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import activation_offload
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_prompted_batch, parameters, same_bits

WIDTH, LAYERS = 32, 2


class WatchedOffload(save_on_cpu):
    """The context itself; it records the shapes of the tensors it moves."""

    shapes: list[torch.Size]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        pack: Any = self.pack_hook

        def watched(tensor: torch.Tensor) -> Any:
            self.shapes.append(tensor.shape)
            return pack(tensor)

        self.pack_hook = watched


def train(folder: Path, algorithm: AlgorithmConfig, **rank: object) -> dict[str, torch.Tensor]:
    values = {"pack_tokens": 256, "head_chunk": 16, "gradient_checkpointing": "full", **rank}
    config = RankConfig.model_validate(values)
    policy = load_policy(policy_config(folder), config)
    trainer = Trainer(
        policy, Optimizer(policy.trained_parameters(), OptimizerConfig()), algorithm, config
    )
    for step in (1, 2):
        trainer.train_step(make_prompted_batch(step=step), 1e-2)
    critic = trainer.critic.state_tensors() if trainer.critic is not None else {}
    return {**parameters(policy), **critic}


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_it_changes_no_bit(
    model_folder: Path, advantage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"advantage": advantage, "critic": {"lr": 1e-3}}
    algorithm = AlgorithmConfig.model_validate(chosen)
    kept = train(model_folder, algorithm)
    WatchedOffload.shapes = []
    monkeypatch.setattr(activation_offload, "save_on_cpu", WatchedOffload)
    moved = train(model_folder, algorithm, offload_activations=True)
    assert same_bits(kept, moved)
    # Of each block its input, [1, tokens, width], and of the final norm; nothing within a block.
    wide = [shape for shape in WatchedOffload.shapes if len(shape) > 2]
    assert len(wide) >= LAYERS
    assert {(len(shape), shape[-1]) for shape in wide} <= {(3, WIDTH), (3, 1)}
