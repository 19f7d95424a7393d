"""Attention of several segments that continue the same prefix, whose keys exist only once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

# Tensors [1, heads, tokens, head_dim] for query, key and value, or for key and value.
Projections = tuple[Tensor, Tensor, Tensor]
KeyValue = tuple[Tensor, Tensor]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_after_prefix(
    own: Projections,
    prefix: KeyValue,
    sizes: Sequence[int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return attention of several segments, end to end, to themselves and to their prefix.

    Key and value may have fewer heads than the query. The result has the query's shape."""
    query, key, value = own
    longest = prefix[0].shape[2] + max(sizes)
    windowed = window is not None and window < longest
    if query.device.type == "cpu" and query.shape[3] == value.shape[3] and not windowed:
        return _CascadeAttention.apply(*cast_as_products(*own, *prefix), tuple(sizes), scaling)
    return torch.cat(
        [
            _attend_lower_right((q, k, v), prefix, scaling, window if windowed else None)
            for q, k, v in zip(*(t.split(list(sizes), 2) for t in (query, key, value)), strict=True)
        ],
        dim=2,
    )


def banded_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return [queries, keys], true where the last `queries` of the keys' positions may look."""
    places = torch.arange(keys, device=device)
    distance = places[keys - queries :, None] - places[None, :]
    return (distance >= 0) & (distance < window)


def _attend_lower_right(
    own: Projections, prefix: KeyValue, scaling: float | None, window: int | None
) -> Tensor:
    query, key, value = own
    reach = prefix[0].shape[2] if window is None else min(window - 1, prefix[0].shape[2])
    if reach:
        key, value = (
            torch.cat([before[:, :, -reach:], after], dim=2)
            for before, after in zip(prefix, (key, value), strict=True)
        )
    queries, keys = query.shape[2], key.shape[2]
    mask = (
        _lower_right_bias(queries, keys)
        if window is None
        else banded_mask(queries, keys, window, query.device)
    )
    if query.device.type == "cuda":
        # No masked kernel shares heads there.
        shared = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=key.shape[1] < query.shape[1]
    )


def _lower_right_bias(queries: int, keys: int) -> CausalBias:
    """Return the bias by which the last `queries` of the keys' positions see no later key."""
    # Its constructor fails where products and attention are kept for the backward pass.
    bias = torch.empty(0).as_subclass(CausalBias)
    bias.__init__(CausalVariant.LOWER_RIGHT, queries, keys)
    return bias


def cast_as_products(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast, if enabled, casts scaled dot product attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]


class _CascadeAttention(torch.autograd.Function):
    """Attention to the prefix and to the segment itself, merged by their sums of exponentials.

    The gradients of both parts are those of the merged result: of it, the kernels' backward passes
    need only the result and its sum."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prefix_key: Tensor,
        prefix_value: Tensor,
        sizes: tuple[int, ...],
        scaling: float | None,
    ) -> Tensor:
        shared, shared_sum = _flash(query, prefix_key, prefix_value, scale=scaling)
        parts = zip(*(t.split(sizes, 2) for t in (query, key, value)), strict=True)
        pairs = [_flash(*part, is_causal=True, scale=scaling) for part in parts]
        own, own_sum = (torch.cat(found, dim=2) for found in zip(*pairs, strict=True))
        total = torch.logaddexp(shared_sum, own_sum)
        answer = shared * (shared_sum - total).exp()[..., None]
        answer = (answer + own * (own_sum - total).exp()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, answer, total)
        ctx.sizes, ctx.scaling = sizes, scaling
        return answer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, prefix_key, prefix_value, answer, total = ctx.saved_tensors
        scale = ctx.scaling
        shared, *of_prefix = _flash_backward(
            grads[0], query, prefix_key, prefix_value, answer, total, 0.0, False, scale=scale
        )
        whole = (grads[0], query, key, value, answer, total)
        parts = zip(*(t.split(ctx.sizes, 2) for t in whole), strict=True)
        found = [_flash_backward(*part, 0.0, True, scale=scale) for part in parts]
        own, *of_own = (torch.cat(each, dim=2) for each in zip(*found, strict=True))
        return shared + own, *of_own, *of_prefix, None, None
