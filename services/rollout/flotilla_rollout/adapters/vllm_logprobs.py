"""Logprobs of large vocabularies on CPUs. vLLM's workers import this module."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def correct_sampler(sampler: Any) -> None:
    """Make a sampler of vLLM compute its logprobs by `exact_log_softmax`."""
    sampler.compute_logprobs = exact_log_softmax
    filtered = sampler.topk_topp_sampler
    if filtered.logprobs_mode == "processed_logprobs":
        filtered.logprobs_mode = "processed_logits"
        filtered.forward = _normalize_logits(filtered.forward)


def exact_log_softmax(logits: Tensor) -> Tensor:
    """Return the float32 logprobs of logits, [..., vocabulary].

    On CPUs `torch.log_softmax` adds a row's exponentials in one sum per lane of a vector register.
    In the lane of a likely token most of the unlikely ones vanish by rounding, each too small to
    change the sum. `logsumexp` adds pairwise and keeps them."""
    logits = logits.float()
    return logits - logits.logsumexp(-1, keepdim=True)


def _normalize_logits(
    forward: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward_normalized(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        sampled, logits = forward(*arguments, **named)
        return sampled, exact_log_softmax(logits)

    return forward_normalized
