"""The budget of a turn's thinking: the tokens of a request, and the end of a thinking over it."""

from collections.abc import Sequence

import numpy as np

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.ports import Dialect
from flotilla_rollout.types import Completion, PolicySpan


class ThinkingBudget:
    """Budget of `tokens` for the thinking at the start of each turn; None for no budget.

    The first request of a turn samples at most the budget. If the policy is still thinking then,
    the family's own end of a thinking is appended, and the next request continues from there.
    Raises ConfigError if the family has no mark that ends a thinking.
    """

    def __init__(self, dialect: Dialect, tokens: int | None) -> None:
        if tokens is not None and not dialect.thinking.end_ids:
            raise ConfigError(
                "rollout.limits.thinking_tokens: this model's vocabulary has no token that ends a"
                " thinking; leave it out, or name the marks by rollout.dialect.reasoning"
            )
        self._thinking = dialect.thinking
        self._tokens = tokens

    def bound_request(self, written: Sequence[int], most: int) -> int:
        """Return how many of `most` tokens may be sampled after the `written` part of a turn."""
        if self._tokens is None or (written and not self._is_over(written, 0)):
            return most
        return min(most, max(self._tokens - len(written), 1))

    def make_end(self, written: Sequence[int], room: int) -> Completion | None:
        """Return the end of a thinking that has used up its budget: tokens of no policy, without
        logprobs, at most `room` of them. None if the turn may continue as it is."""
        if self._tokens is None or room < 1 or not self._is_over(written, self._tokens):
            return None
        ids = np.array(self._thinking.end_ids[:room], np.int32)
        spans = (PolicySpan(None, len(ids)),)
        return Completion(ids, np.zeros(0, np.float32), spans, cut=True)

    def _is_over(self, written: Sequence[int], tokens: int) -> bool:
        """Return True if `written` ends inside a thinking of so many tokens."""
        return len(written) >= tokens and self._thinking.is_thinking(written)
