"""Published multimodal models: what cannot be trained as text is refused by its config.json, before
its tokenizer or its weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig, SharedConfig
from flotilla_rollout.__main__ import check_dialect
from flotilla_rollout.config.rollout import RolloutConfig

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def published(kind: str, name: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [name],
        "model_type": kind,
        "text_config": {"model_type": text, "hidden_size": 4096},
        "vision_config": {"hidden_size": 1152},
        **more,
    }


TRAINED: dict[str, dict[str, Any]] = {
    "Qwen3-VL-8B": published("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "Qwen3.5-4B": published("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "Qwen3.5-35B-A3B": published(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"
    ),
    "Gemma 3": published("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    "Mistral Small 3.2": published("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
    "Gemma 4": published("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text"),
}
REFUSED: dict[str, dict[str, Any]] = {
    "GLM-4.5V": published("glm4v_moe", "Glm4vMoeForConditionalGeneration", "glm4v_moe_text"),
    "GLM-4.1V": published("glm4v", "Glm4vForConditionalGeneration", "glm4v_text"),
    "Ministral 3, FP8": published(
        "mistral3", "Mistral3ForConditionalGeneration", "ministral3", quantization_config=FP8
    ),
    "Kimi K2.5": published("kimi_k25", "KimiK25ForConditionalGeneration", "kimi_k2"),
    "Llama 4": published("llama4", "Llama4ForConditionalGeneration", "llama4_text"),
    "InternVL 3.5": {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": {"model_type": "qwen3"},
        "vision_config": {"hidden_size": 1024},
    },
    "Qwen3-Omni": {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"text_config": {"hidden_size": 2048}},
    },
    "unknown": published("of_next_year", "OfNextYearForConditionalGeneration", "next_year"),
}


def check(settings: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(settings))
    policy = PolicyConfig(model=str(folder), max_model_len=64)
    config = RolloutConfig(max_input_length=8, max_generate_length=8)
    with pytest.raises(ConfigError) as caught:
        check_dialect(SharedConfig(name="x", policy=policy), config)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_as_text_is_refused_in_one_sentence(
    name: str, tmp_path: Path
) -> None:
    message = check(REFUSED[name], tmp_path)
    assert REFUSED[name]["architectures"][0] in message
    assert "cannot be trained" in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained_as_text_goes_on_to_its_tokenizer(name: str, tmp_path: Path) -> None:
    assert "has no tokenizer" in check(TRAINED[name], tmp_path)
