"""The contract of torch's flash kernel for segments of many lengths, in plain arithmetic on a CPU.

As flash-attn documents it: span i of the queries meets span i of the keys, and the last query lies
beside the last key ("causal masks are aligned to the bottom right corner")."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"


@contextmanager
def flash_on_cpu() -> Generator[Counter[str]]:
    """Have both operators of torch's kernel work on a CPU; count how often each is called."""
    counts = Counter[str]()

    def forward(*given: Any, **options: Any) -> Any:
        counts[FORWARD] += 1
        return _attend(*given, **options)

    def backward(*given: Any, **options: Any) -> Any:
        counts[BACKWARD] += 1
        return _differentiate(*given, **options)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(FORWARD, forward, "CPU")
        library.impl(BACKWARD, backward, "CPU")
        yield counts
    finally:
        library._destroy()  # pyright: ignore[reportPrivateUsage]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    assert dropout == 0.0
    assert not debug
    _check(query, key, value, (query_ends, most_queries), (key_ends, most_keys))
    sight = _sight(is_causal, window_size_left, window_size_right)
    dtype, (query, key, value) = query.dtype, _wide(query, key, value)
    answer = torch.empty_like(query)
    total = query.new_empty(query.shape[1], len(query))
    shared = query.shape[1] // key.shape[1]
    for (start, end), keys in zip(_spans(query_ends), _spans(key_ends), strict=True):
        k, v = (t[slice(*keys)].repeat_interleave(shared, 1) for t in (key, value))
        scores = _scores(query[start:end], k, scale, sight)
        total[:, start:end] = scores.logsumexp(-1)
        answer[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    own = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    return answer.to(dtype), total, *own, query.new_empty(0)


def _differentiate(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    answer: Tensor,
    total: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate from the given answer and sums, like Dao et al. 2022, algorithm 4."""
    _check(query, key, value, (query_ends, most_queries), (key_ends, most_keys))
    sight = _sight(is_causal, window_size_left, window_size_right)
    dtype, (grad, query, key, value, answer) = query.dtype, _wide(grad, query, key, value, answer)
    found = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    heads, factor = key.shape[1], query.shape[2] ** -0.5 if scale is None else scale
    shared = query.shape[1] // heads
    for (start, end), keys in zip(_spans(query_ends), _spans(key_ends), strict=True):
        here, there = slice(start, end), slice(*keys)
        k, v = (t[there].repeat_interleave(shared, 1) for t in (key, value))
        chances = (_scores(query[here], k, scale, sight) - total[:, here, None]).exp()
        of_chances = torch.einsum("qhd,khd->hqk", grad[here], v)
        mean = (grad[here] * answer[here]).sum(-1).T[..., None]
        of_scores = chances * (of_chances - mean) * factor
        found[0][here] = torch.einsum("hqk,khd->qhd", of_scores, k)
        of_key = torch.einsum("hqk,qhd->khd", of_scores, query[here])
        of_value = torch.einsum("hqk,qhd->khd", chances, grad[here])
        for whole, part in zip(found[1:], (of_key, of_value), strict=True):
            whole[there] = part.unflatten(1, (heads, shared)).sum(2)
    return found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in float32, the type in which the kernel computes and returns its sums."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _check(query: Tensor, key: Tensor, value: Tensor, *ends: tuple[Tensor, int]) -> None:
    """Refuse what the kernel refuses."""
    assert query.dim() == key.dim() == value.dim() == 3
    assert query.shape[2] == key.shape[2] == value.shape[2] <= 256
    assert query.shape[2] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    for (places, longest), tensor in zip(ends, (query, key), strict=True):
        assert places.dtype == torch.int32
        assert places.is_contiguous()
        assert (int(places[0]), int(places[-1])) == (0, len(tensor))
        assert int(places.diff().max()) == longest
        assert int(places.diff().min()) > 0
    assert len(ends[0][0]) == len(ends[1][0])


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(ends.tolist()))


def _sight(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    before, after = (-1 if each is None else each for each in (left, right))
    return before, 0 if is_causal else after


def _scores(query: Tensor, key: Tensor, scale: float | None, sight: tuple[int, int]) -> Tensor:
    factor = query.shape[2] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query, key) * factor
    rows = torch.arange(len(query))[:, None] + len(key) - len(query)
    distance = rows - torch.arange(len(key))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    before, after = sight
    if before >= 0:
        hidden |= distance > before
    if after >= 0:
        hidden |= -distance > after
    return scores.masked_fill(hidden, -torch.inf)
