"""Options that prepare an engine for the adapters that it will receive."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters.adapter_targets import list_adapter_targets
from flotilla_rollout.adapters.vllm_adapter_request import padded_rank
from flotilla_rollout.adapters.vllm_options import ServedModel, engine_options
from flotilla_rollout.config.rollout import EngineConfig


def options(folder: Path, device: str, rank: int | None) -> dict[str, object]:
    policy = PolicyConfig(model=str(folder), max_model_len=64, adapter_rank=rank)
    config = EngineConfig.model_validate({"device": device})
    return engine_options(config, ServedModel(folder, policy, [1]))


def write_model(folder: Path, **settings: int) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    layer, matrix = "model.layers.0.", np.zeros((2, 2), np.float32)
    experts = f"{layer}mlp.experts.0.up_proj.weight"
    named = ("self_attn.q_proj.weight", "mlp.down_proj.weight", "mlp.gate.weight")
    save_file(
        {
            "model.embed_tokens.weight": matrix,
            "lm_head.weight": matrix,
            f"{layer}input_layernorm.weight": matrix[0],
            f"{layer}self_attn.q_proj.bias": matrix[0],
            experts: matrix,
            **{layer + name: matrix for name in named},
        },
        folder / "model.safetensors",
    )


def test_room_is_kept_beside_linear_layers_but_neither_head_nor_routers(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert list_adapter_targets(tmp_path) == ["down_proj", "q_proj"]
    chosen = options(tmp_path, "cpu", 12)
    assert chosen["enable_lora"] is True
    assert chosen["max_lora_rank"] == 16
    assert chosen["lora_target_modules"] == ["down_proj", "q_proj"]
    assert "enable_lora" not in options(tmp_path, "cpu", None)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (129, 256), (512, 512)])
def test_a_rank_gets_the_least_room_that_vllm_has(rank: int, room: int) -> None:
    assert padded_rank(rank) == room


def test_a_mixture_of_experts_is_given_adapters_on_a_gpu_alone(tmp_path: Path) -> None:
    write_model(tmp_path, num_experts=4, num_experts_per_tok=2)
    assert options(tmp_path, "cuda", 8)["max_lora_rank"] == 8
    with pytest.raises(ConfigError, match=r"policy\.adapter_rank: .* has experts"):
        options(tmp_path, "cpu", 8)
