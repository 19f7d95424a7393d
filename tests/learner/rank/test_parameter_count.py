"""Parameters counted from a config.json are those that a model's publisher names."""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flotilla_learner.rank.parameter_count import count_parameters

QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
# What is not given is the default of the class.
PUBLISHED: list[tuple[str, dict[str, Any], float]] = [
    ("qwen3_moe", QWEN3_235B, 235.1e9),
    ("qwen3_moe", QWEN3_30B, 30.5e9),
    ("gpt_oss", {}, 116.8e9),
    ("deepseek_v3", {}, 671e9),
    ("mixtral", {}, 46.7e9),
    ("glm4_moe", {"num_attention_heads": 96, "head_dim": 128}, 106e9),
]


@pytest.mark.parametrize(("kind", "values", "published"), PUBLISHED)
def test_experts_and_shared_layers_are_counted_without_weights(
    kind: str, values: dict[str, Any], published: float, tmp_path: Path
) -> None:
    make_config: Any = CONFIG_MAPPING[kind]
    make_config(**values).save_pretrained(tmp_path)
    assert count_parameters(str(tmp_path)) == pytest.approx(published, rel=0.01)
