"""Renderers of the `renderers` package, by the names of their families."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pydantic
from renderers import configs
from renderers.base import MODEL_RENDERER_MAP, create_renderer

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.thinking import ThinkingForm
from flotilla_rollout.dialects.turns import Retention
from flotilla_rollout.tokenizer_port import TemplateError

if TYPE_CHECKING:
    from renderers.base import Renderer

# Marks of families whose thinking is not between `<think>` tags.
THINKING_FORMS: Mapping[str, ThinkingForm] = {
    "gemma4": ThinkingForm("<|channel>thought", "<channel|>", "\n<channel|>"),
    "gpt-oss": ThinkingForm(
        "<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant"
    ),
}
# Renderers that are not a family of models.
_OTHERS = frozenset({"auto", "default", "custom"})
# The field of every renderer that `rollout.dialect.retention` sets.
_RETENTION = "thinking_retention"


def renderer_names() -> list[str]:
    """Return the names of the families that have a renderer."""
    return sorted(set(MODEL_RENDERER_MAP.values()) | (set(_CONFIGS) - _OTHERS))


def make_renderer(
    tokenizer: TransformersTokenizer, name: str, options: Mapping[str, Any], retention: Retention
) -> "Renderer":
    """Return the renderer of a family. Raises ConfigError on options that it does not accept, and
    TemplateError if the tokenizer lacks a token that the family needs."""
    if _RETENTION in options:
        raise ConfigError(f"rollout.dialect.options.{_RETENTION}: set rollout.dialect.retention")
    try:
        # Always set: by default some renderers would render everything again after every turn.
        config = _CONFIGS[name].model_validate({**options, _RETENTION: retention})
    except pydantic.ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
        known = ", ".join(sorted(_CONFIGS[name].model_fields.keys() - {"name", _RETENTION}))
        raise ConfigError(f"rollout.dialect.options: {problems}; {name} takes {known}") from error
    try:
        return create_renderer(tokenizer.fast, config)  # pyright: ignore[reportArgumentType]
    except Exception as error:
        raise TemplateError(
            f"rollout.dialect.name: the tokenizer is none of {name!r}: {error}"
        ) from error


def _find_configs() -> dict[str, type[configs.BaseRendererConfig]]:
    found = {
        str(each.model_fields["name"].default): each
        for each in vars(configs).values()
        if isinstance(each, type)
        and issubclass(each, configs.BaseRendererConfig)
        and "name" in each.model_fields
    }
    return {name: each for name, each in found.items() if name not in _OTHERS}


_CONFIGS = _find_configs()
