"""An engine without a model, for tests and dry runs of everything around it."""

import asyncio
import random
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.picture import ShownPicture
from flotilla_rollout.ports import EngineDead, EngineError
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import Completion, MemoryPeak, PolicySpan, Publication, Sampling

# Returns the policy's next turn, given the text so far.
Script = Callable[[str], str]
LOGPROB = -0.5


class FakeEngine:
    """Engine that writes the turns of `script`, or random tokens, with a fixed duration per
    turn."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        turn_end_id: int,
        script: Script | None = None,
        *,
        seconds: float = 0.0,
        policy: PolicyId | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._turn_end_id = turn_end_id
        self._script = script or self._choose_word
        self._seconds = seconds
        self.policy = policy
        self.running = 0
        # Set its result to have the engine die.
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.loaded: list[PolicyId] = []

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        started_with = self.policy
        if self.death.done():
            raise EngineDead(self.death.result())
        if started_with is None:
            raise EngineError("no policy is loaded")
        self.running += 1
        try:
            await asyncio.sleep(min(self._seconds, timeout_s))
        finally:
            self.running -= 1
        text = self._script(self._tokenizer.decode(token_ids.tolist()))
        ids = [*self._tokenizer.encode(text), self._turn_end_id]
        timed_out = timeout_s < self._seconds
        most = int(len(ids) * timeout_s / self._seconds) if timed_out else max_tokens
        kept = np.array(ids[: min(most, max_tokens)], np.int32)
        return Completion(
            token_ids=kept,
            logprobs=np.full(len(kept), LOGPROB, np.float32),
            spans=_make_spans(started_with, self.policy or started_with, len(kept)),
            cut=len(ids) > max_tokens,
            timed_out=timed_out,
        )

    async def load_weights(self, publication: Publication, path: Path) -> None:
        self.policy = publication.policy
        self.loaded.append(publication.policy)

    async def receive_weights(self, publication: Publication) -> None:
        self.policy = publication.policy
        self.loaded.append(publication.policy)

    async def compute_logprobs(
        self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
    ) -> NDArray[np.float32]:
        return np.full(max(len(token_ids) - 1, 0), LOGPROB, np.float32)

    async def burn_in(
        self,
        token_ids: NDArray[np.int32],
        max_tokens: int,
        timeout_s: float,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        if self.death.done():
            raise EngineDead(self.death.result())
        if (policy := self.policy) is None:
            raise EngineError("no policy is loaded")
        ids = np.full(max_tokens, self._turn_end_id, np.int32)
        logprobs = np.full(max_tokens, LOGPROB, np.float32)
        return Completion(ids, logprobs, (PolicySpan(policy, max_tokens),), cut=True)

    async def measure_memory(self) -> Sequence[MemoryPeak]:
        return ()

    async def identify_devices(self) -> Sequence[str]:
        return ()

    async def wait_until_dead(self) -> str:
        return await self.death

    async def close(self) -> None:
        self.policy = None

    def _choose_word(self, text: str) -> str:
        words: Sequence[str] = text.split() or ["nothing"]
        return random.Random(text).choice(words)


def _make_spans(first: PolicyId, last: PolicyId, length: int) -> tuple[PolicySpan, ...]:
    """Return spans; if the weights changed meanwhile, the first half is by the earlier ones."""
    if first == last or length < 2:
        return (PolicySpan(last, length),)
    half = length // 2
    return (PolicySpan(first, half), PolicySpan(last, length - half))
