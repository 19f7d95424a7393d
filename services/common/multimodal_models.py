"""Models that read images or sound beside text, as described by their config.json.

They are trained on text only: the ranks load the published class without its other parts, whose
weights stay in the model's own files until an export copies them from there."""

from collections.abc import Mapping
from typing import Any

from services.common.errors import ConfigError

# Keys that only the configuration of such a model has.
_MARKS = (
    *("text_config", "language_config", "llm_config", "thinker_config"),
    *("vision_config", "visual", "vision_encoder", "vision_tower", "mm_vision_tower"),
    *("img_processor", "audio_config", "audio_processor"),
)
# Values of model_type whose text part is trained exactly as published.
TRAINED_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")


def is_multimodal(settings: Mapping[str, Any]) -> bool:
    """Return True if a config.json describes a model that reads more than text."""
    return any(settings.get(mark) for mark in _MARKS)


def check_trainable_text(settings: Mapping[str, Any]) -> None:
    """Refuse a multimodal model that cannot be trained on text. Raises ConfigError."""
    if not is_multimodal(settings):
        return
    kind, name = settings.get("model_type"), _describe(settings)
    if kind not in TRAINED_TYPES:
        raise ConfigError(
            f"policy.model: {name} reads more than text, and its text part cannot be trained;"
            f" those of model_type {', '.join(TRAINED_TYPES)} can: choose such a model, or one"
            " that reads only text"
        )
    if quantized := settings.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        raise ConfigError(
            f"policy.model: the weights of {name} are quantized ({method or 'by some method'}), so"
            " they cannot be trained; choose the same model in bfloat16"
        )


def _describe(settings: Mapping[str, Any]) -> str:
    """Return the name of the model's class, which is not trusted, and its type."""
    names = settings.get("architectures")
    first = names[0] if isinstance(names, list) and names else "a model"
    return f"{str(first)[:80]} (model_type {str(settings.get('model_type'))[:80]!r})"
