"""Distributions over candidates: what remains of the vocabulary once `top_k` and `top_p` have
removed the rest.

An engine that samples with them renormalises over the tokens that it keeps, so a logprob of the
whole vocabulary is of another distribution than the sampled one. Over the same candidates both are
of one, whose ratio, KL and entropy have a meaning."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla_common.domain.trajectory import NO_CANDIDATE, Candidates


def join_candidates(
    given: Sequence[Candidates | None], counts: Sequence[int]
) -> NDArray[np.int64] | None:
    """Return the candidates [tokens, most] of sequences with `counts` tokens, end to end; None if
    none has any. Rows are filled up with NO_CANDIDATE, which is all that tokens without hold."""
    most = max((each.shape[1] for each in given if each is not None), default=0)
    if not most:
        return None
    joined = np.full((sum(counts), most), NO_CANDIDATE, np.int64)
    starts = np.cumsum([0, *counts])
    for each, start in zip(given, starts, strict=False):
        if each is not None:
            joined[start : start + len(each), : each.shape[1]] = each
    return joined


def keep_candidates(logits: Tensor, candidates: Tensor, removed: float) -> Tensor:
    """Set all logits [n, vocab] but those of the candidates [n, most] to `removed`, in place; rows
    without candidates keep all."""
    known = candidates != NO_CANDIDATE
    # Rows are filled up with their first one: the same logit is kept twice.
    places = torch.where(known, candidates, candidates[:, :1]).clamp_(min=0)
    kept = logits.gather(1, places)
    return logits.masked_fill_(known.any(1, keepdim=True), removed).scatter_(1, places, kept)
