"""Attention within the segments of a pack, for any model that uses transformers' interface."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "flotilla_segments"

# Arguments that change what attention computes and that scaled dot product attention lacks.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def register() -> None:
    """Makes `attn_implementation=NAME` known to transformers; may be called again."""
    AttentionInterface.register(NAME, _segment_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The segments carry all that a mask would say."""


def _segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_offsets: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each segment with itself.

    query [1, heads, tokens, head_dim], key and value with their own number of heads; the answer
    is [1, tokens, heads, head_dim]. Without `segment_offsets` all tokens are one segment.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"this model's attention needs {name!r}")
    offsets = segment_offsets or (0, query.shape[2])
    grouped = query.shape[1] // key.shape[1]
    if grouped > 1:
        key = key.repeat_interleave(grouped, dim=1)
        value = value.repeat_interleave(grouped, dim=1)
    sizes = [end - start for start, end in pairwise(offsets)]
    segments = zip(*(t.split(sizes, dim=2) for t in (query, key, value)), strict=True)
    parts = [_causal(q, k, v, scaling, sliding_window) for q, k, v in segments]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    length = query.shape[2]
    if window is None or window >= length:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
    distance = torch.arange(length, device=query.device)
    distance = distance[:, None] - distance[None, :]
    mask = (distance >= 0) & (distance < window)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
