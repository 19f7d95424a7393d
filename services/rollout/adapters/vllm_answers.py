"""Checks of engines' answers at the boundary."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.rollout.ports import EngineError
from services.rollout.types import Completion


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
