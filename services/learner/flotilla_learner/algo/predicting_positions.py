"""Positions whose logits predict the trained tokens."""

import numpy as np
from numpy.typing import NDArray


def predicting_positions(policy_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return positions whose next token the policy wrote; their hidden states give its logprobs.

    Raises ValueError if the policy wrote the first token, which nothing predicts.
    """
    positions = np.flatnonzero(policy_mask) - 1
    if len(positions) and positions[0] < 0:
        raise ValueError(
            "the first token of a sequence must be a prompt's, but the policy wrote it"
        )
    return positions
