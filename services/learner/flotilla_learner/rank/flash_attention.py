"""Attention of all segments of a pack by one call of torch's flash kernel, on a GPU.

Its key heads serve several query heads each without copies, and a shared parent is read once for
all segments that continue it. `KernelPlaces` describes which queries meet which keys."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flotilla_learner.rank.segment_places import (
    KernelPlaces,
    KernelSpans,
    PrefixRun,
    SharedPrefixes,
    Span,
)

# Number of tokens before and after its own place that a query sees, from the end of the keys: the
# kernel aligns the last query there ("lower right"; see torch.nn.attention.bias).
_Sight = tuple[int, int]
_EVERYTHING: _Sight = (-1, -1)
_ALL_BEFORE: _Sight = (-1, 0)
_DROPOUT = 0.0

# The operator behind `torch.nn.attention.varlen.varlen_attn`, in torch 2.11 and 2.13 alike; its own
# backward pass accepts no merged result.
_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


def runs_on_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if torch runs attention of these, [1, heads, tokens, head_dim], on its kernel.

    That requires half precision, heads of up to 256 numbers, and a GPU since Ampere. Scaled dot
    product attention pads heads to a multiple of 8; this code does not."""
    grouped = key.shape[1] < query.shape[1]
    given = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, grouped)
    return query.shape[3] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(given)


def attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: KernelPlaces,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return causal attention of each segment with itself, and with all of its parent.

    All are [1, heads, tokens, head_dim], key and value with their own number of heads; the
    result is [1, tokens, heads, head_dim]. `places` must serve the window."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    spans, prefixes, sight = places.own, places.prefixes, _ALL_BEFORE
    if window is not None and window < places.longest:
        sight = (window - 1, 0)
        if places.windowed is not None:
            # A window moves with each query, so one result for a parent would not fit all segments
            # that continue it. They share no more of it than the window's length.
            key, value = (t.index_select(0, places.windowed.places) for t in (key, value))
            spans, prefixes = places.windowed.spans, None
    call = _KernelCall(spans, scaling, sight)
    return _FlashAttention.apply(query, key, value, call, prefixes)[None]


@dataclass(frozen=True, slots=True)
class _KernelCall:
    """Non-tensor arguments of a call of the kernel."""

    spans: KernelSpans
    scaling: float | None
    sight: _Sight

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the result, its log sums of exponentials [heads, queries] and the kernel's own."""
        return _flash(query, key, value, *self._places, False, **self._options)[:4]

    def backward(
        self, grad: Tensor, given: Sequence[Tensor], answer: Tensor, total: Tensor, own: Any
    ) -> list[Tensor]:
        """Return the gradients of query, key and value; `own` is the kernel's."""
        called = (grad, *given, answer, total, *self._places, *own)
        return list(_flash_backward(*called, **self._options))

    @property
    def _places(self) -> tuple[Any, ...]:
        spans = self.spans
        longest = (spans.most_queries, spans.most_keys)
        return spans.queries, spans.keys, *longest, _DROPOUT, self.sight == _ALL_BEFORE

    @property
    def _options(self) -> dict[str, Any]:
        before, after = self.sight
        return {"scale": self.scaling, "window_size_left": before, "window_size_right": after}


class _FlashAttention(torch.autograd.Function):
    """Attention to segments themselves and to prefixes, merged by their sums of exponentials.

    Like in `_CascadeAttention` for CPUs, both backward passes receive the merged result."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: _KernelCall,
        prefixes: SharedPrefixes | None,
    ) -> Tensor:
        given = (query, key, value)
        answer, total, *own = call.forward(*given)
        if prefixes is not None:
            shared, shared_total, *_ = _prefix_call(call, prefixes).forward(*_cut(given, prefixes))
            answer, total = _merge((answer, total), (shared, shared_total), prefixes.runs)
        ctx.save_for_backward(*given, answer, total, *own)
        # Not saved tensors: hooks that move those to the host must not move the pack's places.
        ctx.call, ctx.prefixes = call, prefixes
        return answer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, answer, total, *own = ctx.saved_tensors
        given, prefixes = (query, key, value), ctx.prefixes
        found = ctx.call.backward(grads[0], given, answer, total, own)
        if prefixes is not None:
            spans = [run.own for run in prefixes.runs]
            seen = [_join_spans(each, spans) for each in (answer, total.T)]
            part = _prefix_call(ctx.call, prefixes).backward(
                _join_spans(grads[0], spans),
                _cut(given, prefixes),
                seen[0],
                seen[1].T.contiguous(),
                own,
            )
            parents = [run.parent for run in prefixes.runs]
            for whole, added, places in zip(found, part, (spans, parents, parents), strict=True):
                _add_back(whole, added, places)
        return *found, None, None


def _prefix_call(call: _KernelCall, prefixes: SharedPrefixes) -> _KernelCall:
    return replace(call, spans=prefixes.spans, sight=_EVERYTHING)


def _cut(given: Sequence[Tensor], prefixes: SharedPrefixes) -> list[Tensor]:
    """Return the queries that continue a parent, and the parents' keys and values."""
    own, parents = ([run.own for run in prefixes.runs], [run.parent for run in prefixes.runs])
    places = (own, parents, parents)
    return [_join_spans(each, spans) for each, spans in zip(given, places, strict=True)]


def _join_spans(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    """Concatenate spans of the first dimension; a single one without a copy."""
    parts = [tensor[start:end] for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _add_back(whole: Tensor, part: Tensor, spans: Sequence[Span]) -> None:
    sizes = [end - start for start, end in spans]
    for (start, end), piece in zip(spans, part.split(sizes), strict=True):
        whole[start:end] += piece


def _merge(
    own: tuple[Tensor, Tensor], shared: tuple[Tensor, Tensor], runs: tuple[PrefixRun, ...]
) -> tuple[Tensor, Tensor]:
    """Return results and sums over own and shared keys, each weighted by its exponentials.

    The inputs stay unchanged: recomputation of activations may have kept them."""
    answer, total = own[0].clone(), own[1].clone()
    sizes = [run.own[1] - run.own[0] for run in runs]
    pieces = zip(runs, shared[0].split(sizes), shared[1].split(sizes, 1), strict=True)
    for run, piece, piece_sum in pieces:
        place = slice(*run.own)
        weight = torch.sigmoid(piece_sum - total[:, place]).T[..., None]
        before = answer[place].to(weight.dtype)
        answer[place] = torch.lerp(before, piece.to(weight.dtype), weight).to(answer.dtype)
        total[:, place] = torch.logaddexp(total[:, place], piece_sum)
    return answer, total
