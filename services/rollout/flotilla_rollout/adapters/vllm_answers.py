"""Checks of engines' answers at the boundary."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.trajectory import NO_CANDIDATE, Candidates
from flotilla_rollout.ports import EngineError
from flotilla_rollout.types import Completion


def check_completion(completion: Completion, engine: str = "vLLM") -> Completion:
    """Raise EngineError unless every token has a logprob and a policy.

    A fault missed here would be trained on, or refused by the learner without naming its source."""
    tokens = len(completion.token_ids)
    spanned = sum(span.length for span in completion.spans)
    if not tokens == len(completion.logprobs) == spanned:
        counts = f"{tokens} tokens, {len(completion.logprobs)} logprobs, policies of {spanned}"
        raise EngineError(f"{engine} answered with {counts}")
    if not np.isfinite(completion.logprobs).all():
        raise EngineError(f"{engine} answered with a logprob that is no number")
    return completion


def sampled_logprobs(flat: Any) -> NDArray[np.float32]:
    """Return the logprobs of the first token listed at each position, which is the sampled one.

    A logprob that rounding raised above 0 becomes 0."""
    values = np.array(flat.logprobs, np.float32)
    first = np.array(flat.start_indices, np.int64)
    return np.minimum(values[first[first < len(values)]], np.float32(0.0))


def sampled_among_candidates(flat: Any, top_k: int) -> tuple[NDArray[np.float32], Candidates, int]:
    """Return each token's logprob among its candidates, these [tokens, top_k], and the number of
    tokens that were not among them.

    At each position vLLM lists the sampled token, then the `top_k` likeliest. Those that it could
    not sample have the logprob -inf. If tokens tie for the last place, it samples from all of them
    and lists only some: a sampled one that is left out replaces the least likely, and logprobs are
    normalised again over those listed, which are all that the trainer knows of."""
    ids = np.array(flat.token_ids, np.int32).reshape(-1, top_k + 1)
    scores = np.array(flat.logprobs, np.float64).reshape(-1, top_k + 1)
    sampled, own = ids[:, 0], scores[:, 0]
    listed, likely = ids[:, 1:].copy(), scores[:, 1:].copy()
    left_out = ~((listed == sampled[:, None]) & np.isfinite(likely)).any(1)
    listed[left_out, -1], likely[left_out, -1] = sampled[left_out], own[left_out]
    listed[np.isneginf(likely)] = NO_CANDIDATE
    logprobs = own - np.logaddexp.reduce(likely, axis=1)
    return np.minimum(logprobs, 0.0).astype(np.float32), listed, int(left_out.sum())
