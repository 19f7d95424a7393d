"""Activations that the backward pass recomputes instead of keeping them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from flotilla_common.models.activation_memory import (
    Checkpointing,
    DecoderShape,
    layer_activation_bytes,
)

# Operators whose results `selective` keeps: matrix products and attention, which cost most.
_KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
)
# Usable share of the device's memory; the rest is for the allocator and the libraries.
_USABLE = 0.9
_CHOICES: Sequence[Checkpointing] = ("off", "selective", "full")


def enable_checkpointing(model: Any, checkpointing: Checkpointing) -> None:
    """Have the model's decoder blocks keep less; their results stay the same bit for bit."""
    if checkpointing == "off":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _keep_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = operator.name().rpartition(".")[0] or operator.name()
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def choose_checkpointing(
    settings: Any,
    tokens: int,
    dtype: torch.dtype,
    taken: int,
    device_bytes: int,
    *,
    compiled: bool = False,
    tower: bool = False,
) -> Checkpointing:
    """Return the least checkpointing that fits beside `taken` bytes on a device of `device_bytes`.

    `settings` are the model's own, `tokens` those of the longest pack. `selective` cannot see
    its results within `compiled` blocks, so it is skipped for them. With `tower`, what reads
    pictures is trained, too, and all tokens may be theirs."""
    shapes = [(decoder_shape(settings), tokens)]
    if tower:
        shapes.append(
            (_tower_shape(settings), tokens * settings.vision_config.spatial_merge_size**2)
        )
    for choice in ("off",) if compiled else _CHOICES[:-1]:
        activations = sum(
            layer_activation_bytes(shape, count, dtype.itemsize, choice) for shape, count in shapes
        )
        if taken + activations <= _USABLE * device_bytes:
            return choice
    return _CHOICES[-1]


def _tower_shape(settings: Any) -> DecoderShape:
    vision = settings.vision_config
    return DecoderShape(vision.depth, vision.hidden_size, vision.intermediate_size)


def decoder_shape(settings: Any) -> DecoderShape:
    """Return the sizes of a model's decoder from its Hugging Face configuration."""
    text = settings.get_text_config()
    hidden = int(text.hidden_size)
    intermediate = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    return DecoderShape(int(text.num_hidden_layers), hidden, intermediate)
