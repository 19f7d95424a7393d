"""The size of a model without weight files: counted, never guessed from its dense layers."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.doctor.findings import FindingError
from flotilla_launcher.doctor.model_size import (
    INDEX,
    UnknownModelSizeError,
    count_stored,
    read_model_size,
)
from flotilla_launcher.doctor.policy_files import measure_policy
from tests.support.doctor import sections, spec, subject

# Qwen3-235B-A22B, as published.
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}


def folder_of(path: Path, **settings: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(EXPERTS | settings))
    return path


async def test_a_mixture_of_experts_without_weights_is_counted_whole(
    tasks: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    content = spec(folder_of(tmp_path / "model"), tasks)
    about = replace(subject(content, tmp_path), sections=sections(content))
    assert (await measure_policy(about)).parameters == 235_093_634_560


@pytest.mark.slow
async def test_one_of_an_unknown_type_is_not_guessed(tasks: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    content = spec(folder_of(tmp_path / "model", model_type="nobody_knows"), tasks)
    about = replace(subject(content, tmp_path), sections=sections(content))
    with pytest.raises(FindingError, match="mixture of experts, without weights"):
        await measure_policy(about)


def test_a_dense_model_is_estimated(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", num_experts=0)
    assert 21e9 < read_model_size(folder).parameters < 23e9
    with pytest.raises(UnknownModelSizeError):
        read_model_size(folder_of(tmp_path / "experts"))


def test_bytes_of_quantized_weights_are_no_count(tmp_path: Path) -> None:
    index = json.dumps({"metadata": {"total_size": 65_248_815_744}})
    for name, quantization in (("plain", None), ("packed", {"quant_method": "mxfp4"})):
        folder = folder_of(tmp_path / name, quantization_config=quantization)
        (folder / INDEX).write_text(index)
        assert count_stored(folder) == (32_624_407_872 if quantization is None else 0)
