"""An engine whose policy thinks no longer than a budget in each turn."""

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.rollout.ports import Clock
from services.rollout.types import Completion, PolicySpan, Sampling


class Sampler(Protocol):
    """The part of an engine that samples turns."""

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
    ) -> Completion: ...


class ThinkingBudget:
    """Sampler of turns whose thinking is ended after `budget` tokens.

    The turn is sampled up to the budget first. When the policy is still thinking then,
    `end_ids` are put behind what it wrote, and the turn goes on from there: they belong to no
    policy, have no logprobs and are not trained on. The turn's prefix is in the engine's cache.
    """

    def __init__(
        self,
        engine: Sampler,
        budget: int,
        end_ids: Sequence[int],
        is_thinking: Callable[[Sequence[int]], bool],
        clock: Clock = time.monotonic,
    ) -> None:
        """Create it; `is_thinking` says of a turn's ids whether they end inside the thinking."""
        self._engine = engine
        self._budget = budget
        self._end_ids = np.array(end_ids, np.int32)
        self._is_thinking = is_thinking
        self._clock = clock

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
    ) -> Completion:
        """Sample one turn of at most `max_tokens`, forced ones included."""
        ends = self._clock() + timeout_s
        first = await self._engine.generate(
            token_ids, sampling, min(max_tokens, self._budget), timeout_s
        )
        if first.timed_out or not first.cut or max_tokens <= self._budget:
            return first
        forced = self._end_ids
        if not self._is_thinking(first.token_ids.tolist()):
            forced = self._end_ids[:0]
        forced = forced[: max_tokens - self._budget]
        room = max_tokens - self._budget - len(forced)
        if not room:
            return _join(first, forced, None)
        so_far = np.concatenate([token_ids, first.token_ids, forced])
        rest = await self._engine.generate(so_far, sampling, room, ends - self._clock())
        return _join(first, forced, rest)


def _join(first: Completion, forced: NDArray[np.int32], rest: Completion | None) -> Completion:
    """Join both halves of a turn around what was put between them."""
    put = (PolicySpan(None, len(forced)),) if len(forced) else ()
    if rest is None:
        ids = np.concatenate([first.token_ids, forced])
        return Completion(ids, first.logprobs, (*first.spans, *put), cut=True)
    return Completion(
        token_ids=np.concatenate([first.token_ids, forced, rest.token_ids]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        spans=(*first.spans, *put, *rest.spans),
        cut=rest.cut,
        timed_out=rest.timed_out,
    )
