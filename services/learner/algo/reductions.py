"""From token losses to one loss, by weights that are fixed before the batch is cut up.

A token's weight depends on the whole update's batch and never on the micro-batch that it happens
to be in; the loss is the weighted sum. So the loss and its gradient do not depend on how many
sequences fit into memory at once.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

# Policy tokens of each sequence to the weight of each of that sequence's policy tokens.
Reduction = Callable[[Sequence[int]], NDArray[np.float64]]


def token_mean(policy_tokens: Sequence[int]) -> NDArray[np.float64]:
    """Every policy token of the batch weighs the same: 1 / (their number in the whole batch).

    DAPO, arXiv 2503.14476, equation 12.
    """
    return np.full(len(policy_tokens), 1.0 / max(1, sum(policy_tokens)))


def sequence_mean(policy_tokens: Sequence[int]) -> NDArray[np.float64]:
    """Every sequence weighs the same, however long: 1 / (sequences * its policy tokens).

    GRPO, arXiv 2402.03300, equation 3.
    """
    lengths = np.maximum(np.array(policy_tokens, np.float64), 1.0)
    return 1.0 / (max(1, len(policy_tokens)) * lengths)


REDUCTIONS: Mapping[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
}
