"""Models that read images or sound beside text, as described by their config.json.

Without `policy.vision` they are trained on text only: the ranks load the published class without
its other parts, whose weights stay in the model's own files until an export copies them from
there."""

from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_common.files.json_files import read_json_object
from flotilla_common.rpc.errors import ConfigError

# Keys that only the configuration of such a model has.
_MARKS = (
    *("text_config", "language_config", "llm_config", "thinker_config"),
    *("vision_config", "visual", "vision_encoder", "vision_tower", "mm_vision_tower"),
    *("img_processor", "audio_config", "audio_processor"),
)
# Values of model_type whose text part trainer and engine both compute exactly as published.
TRAINED_TYPES = (
    *("gemma3", "gemma4", "internvl", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
)
# How the names of weights begin in transformers' classes, and in the files of some families.
_FILE_PREFIXES: Mapping[str, Sequence[str]] = {
    "model.language_model.": ("language_model.model.", "model."),
    "model.visual.": ("visual.",),
    "lm_head.": ("language_model.lm_head.",),
}
_NESTED = "language_model."
_TEXT = ("model.language_model.", "language_model.", "lm_head.")
# In files that name other parts beside the text's model, and not within it.
_FLAT_TEXT = ("model.", "lm_head.")


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


def check_trainable_folder(folder: Path) -> None:
    """Refuse such a model by the config.json in its folder, if there is one. Raises ConfigError."""
    try:
        settings = read_json_object(folder / "config.json")
    except ValueError:
        return
    check_trainable_text(settings)


def _describe(settings: Mapping[str, Any]) -> str:
    """Return the name of the model's class, which is not trusted, and its type."""
    names = settings.get("architectures")
    first = names[0] if isinstance(names, list) and names else "a model"
    return f"{str(first)[:80]} (model_type {str(settings.get('model_type'))[:80]!r})"


def name_in_files(name: str, files: Container[str]) -> str:
    """Return the name that a model's files give to a weight which its class names `name`; the same
    name if they have no other."""
    for own, others in _FILE_PREFIXES.items():
        if name.startswith(own):
            found = (other + name.removeprefix(own) for other in (own, *others))
            return next((other for other in found if other in files), name)
    return name


def other_parts(files: Collection[str]) -> set[str]:
    """Return which of the weights in a multimodal model's files are not its text part's: those that
    training leaves as they are."""
    nested = any(_NESTED in name for name in files)
    return {name for name in files if not name.startswith(_TEXT if nested else _FLAT_TEXT)}
