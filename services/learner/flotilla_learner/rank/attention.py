"""Attention within the segments of a pack, for any model that uses transformers' interface."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from flotilla_learner.rank.flash_attention import attend_at_once, runs_on_flash
from flotilla_learner.rank.prefix_attention import (
    Projections,
    attend_after_prefix,
    banded_mask,
    cast_as_products,
)
from flotilla_learner.rank.segment_places import SegmentPlaces

NAME = "flotilla_segments"

# Arguments that change attention's result and that scaled dot product attention lacks.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def register() -> None:
    """Register `attn_implementation=NAME` with transformers; may be called again.

    No mask is registered with it, so transformers makes none: the segments carry its content, and
    making it would synchronise with the device in each pass."""
    AttentionInterface.register(NAME, _segment_attention)


@torch.compiler.disable
def _segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_places: SegmentPlaces | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each segment with itself, and with all of its parent.

    query [1, heads, tokens, head_dim], key and value with their own number of heads; the result
    is [1, tokens, heads, head_dim]. Without `segment_places` all tokens are one segment.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"this model's attention needs {name!r}")
    places = segment_places or SegmentPlaces((0, query.shape[2]), (None,))
    if places.kernel is not None and places.kernel.serves(sliding_window):
        query, key, value = cast_as_products(query, key, value)
        if runs_on_flash(query, key, value):
            kernel = places.kernel
            return attend_at_once(query, key, value, kernel, scaling, sliding_window), None
    return _attend_one_by_one((query, key, value), places, scaling, sliding_window), None


def _attend_one_by_one(
    given: Projections, places: SegmentPlaces, scaling: float | None, window: int | None
) -> Tensor:
    def cut_out(start: int, end: int) -> Projections:
        query, key, value = (tensor[:, :, start:end] for tensor in given)
        return query, key, value

    offsets, parents = places.offsets, places.parents
    parts: list[Tensor] = []
    for parent, run in groupby(range(len(parents)), key=parents.__getitem__):
        spans = [(offsets[i], offsets[i + 1]) for i in run]
        if parent is None:
            parts += [_causal(*cut_out(*span), scaling, window) for span in spans]
            continue
        own = cut_out(spans[0][0], spans[-1][1])
        prefix = cut_out(offsets[parent], offsets[parent + 1])[1:]
        sizes = [end - start for start, end in spans]
        parts.append(attend_after_prefix(own, prefix, sizes, scaling, window))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    if query.device.type == "cuda":
        shared = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    # On a CPU, no key or value head is copied for the query heads that share it.
    grouped, length = key.shape[1] < query.shape[1], query.shape[2]
    if window is None or window >= length:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    mask = banded_mask(length, length, window, query.device)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
