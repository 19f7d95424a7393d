"""What a config.json says of a multimodal model: whether its text part is trained, and why not."""

from typing import Any

import pytest

from flotilla_common.models.multimodal_models import (
    TRAINED_TYPES,
    check_trainable_text,
    is_multimodal,
    name_in_files,
    other_parts,
)
from flotilla_common.rpc.errors import ConfigError


def settings(kind: str, **others: Any) -> dict[str, Any]:
    return {
        "architectures": ["SomethingForConditionalGeneration"],
        "model_type": kind,
        "text_config": {"hidden_size": 8},
        "vision_config": {"depth": 2},
        **others,
    }


@pytest.mark.parametrize("kind", TRAINED_TYPES)
def test_a_type_that_is_trained_passes(kind: str) -> None:
    check_trainable_text(settings(kind))


@pytest.mark.parametrize(
    "config",
    [
        settings("kimi_k25"),
        settings("llama4", quantization_config=None),
        {"model_type": "phi3_v", "img_processor": {"name": "clip"}},
        {"model_type": "molmo", "vision_config": {}, "llm_config": {"hidden_size": 8}},
        {"text_config": {"hidden_size": 8}},
    ],
)
def test_any_other_multimodal_model_is_refused_in_one_sentence(config: dict[str, Any]) -> None:
    assert is_multimodal(config)
    with pytest.raises(ConfigError) as caught:
        check_trainable_text(config)
    message = str(caught.value)
    assert repr(str(config.get("model_type"))) in message and "qwen3_vl" in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("quantization", "named"), [({"quant_method": "fp8"}, "fp8"), ("odd", "by some method")]
)
def test_quantized_weights_are_refused(quantization: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_trainable_text(settings("mistral3", quantization_config=quantization))


def test_a_long_name_of_a_class_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        check_trainable_text(settings("x" * 5000, architectures=["y" * 5000]))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("config", [{}, {"model_type": "qwen3"}, {"vision_config": None}])
def test_a_model_of_text_alone_passes(config: dict[str, Any]) -> None:
    assert not is_multimodal(config)
    check_trainable_text(config)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (("model.language_model.layers.0.w", "lm_head.weight"), ("model.visual.w", "mtp.w")),
        (
            ("language_model.model.layers.0.w", "language_model.lm_head.weight"),
            ("vision_tower.w", "multi_modal_projector.w"),
        ),
        (("model.layers.0.w", "lm_head.weight"), ("visual.w",)),
    ],
)
def test_names_in_files_of_each_kind_are_found(
    text: tuple[str, str], other: tuple[str, ...]
) -> None:
    files = {*text, *other}
    own = ("model.language_model.layers.0.w", "lm_head.weight")
    assert tuple(name_in_files(name, files) for name in own) == text
    assert other_parts(files) == set(other)
    assert name_in_files("model.language_model.layers.1.w", files) not in files
    seen = [name for name in other if "visual" in name]
    assert [name_in_files("model.visual.w", files) for _ in seen] == seen
