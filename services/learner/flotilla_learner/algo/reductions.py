"""Reductions of token losses to one loss, by weights fixed before the batch is split.

A token's weight depends on the whole update's batch and never on the micro-batch, pack or rank
that it happens to be in; the loss is the weighted sum. So the loss and its gradient do not depend
on how many sequences fit into memory at once.

The count covers the policy tokens of every sequence of the update, groups without a signal
included, except sequences that overlong filtering masks (their count is 0). Tokens that a
correction masks do count: they are known only after the forward pass, and counting them makes a
step smaller, not noisier, the more of them there are."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

# Maps (policy tokens of each sequence, norm_tokens) to the weight of each sequence's tokens.
Reduction = Callable[[Sequence[int], int], NDArray[np.float64]]


def token_mean(policy_tokens: Sequence[int], norm_tokens: int) -> NDArray[np.float64]:
    """Weight every policy token of the batch equally: 1 / (their number in the whole batch).

    DAPO, arXiv 2503.14476, equation 12.
    """
    return np.full(len(policy_tokens), 1.0 / max(1, sum(policy_tokens)))


def sequence_mean(policy_tokens: Sequence[int], norm_tokens: int) -> NDArray[np.float64]:
    """Weight every sequence equally, whatever its length: 1 / (sequences * its policy tokens).

    GRPO, arXiv 2402.03300, equation 3. A sequence without policy tokens does not count.
    """
    lengths = np.maximum(np.array(policy_tokens, np.float64), 1.0)
    return 1.0 / (_count_sequences(policy_tokens) * lengths)


def sequence_mean_token_sum_norm(
    policy_tokens: Sequence[int], norm_tokens: int
) -> NDArray[np.float64]:
    """Weight every token by 1 / (sequences * norm_tokens): long sequences keep their weight.

    Dr. GRPO, arXiv 2503.20783, section 3.2 and its appendix's masked_mean by a constant.
    """
    return np.full(len(policy_tokens), 1.0 / (_count_sequences(policy_tokens) * norm_tokens))


def _count_sequences(policy_tokens: Sequence[int]) -> int:
    return max(1, sum(tokens > 0 for tokens in policy_tokens))


REDUCTIONS: Mapping[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
}
