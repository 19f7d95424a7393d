"""The growing tokens of one attempt: appended, never rebuilt."""

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.common.domain.token_authors import Author, Span
from services.common.domain.trajectory import MOST_MEDIA_BYTES, Experts, Media
from services.common.domain.trajectory import Sequence as TokenSequence
from services.rollout.episodes.observation_cut import keep_whole
from services.rollout.types import Completion

# Items of media; the learner takes four times as many.
MOST_KEPT = 1024


class PrefixBroken(AssertionError):
    """The engine's next tokens do not start with those that it saw before."""


class Transcript:
    """Token ids with their authors; policy tokens carry logprobs and the policy that wrote them.

    What the environment writes is cut at `window`: a longer sequence is no policy's input."""

    def __init__(
        self, prompt_ids: Sequence[int] | NDArray[np.int32], window: int = sys.maxsize
    ) -> None:
        self._window = window
        self._ids = np.array(prompt_ids[:window], dtype=np.int32)
        self._seen = self._ids[:0]
        self._spans = [Span(Author.PROMPT, len(self._ids))]
        self._logprobs: list[NDArray[np.float32]] = []
        self._media: list[Media] = []
        self._hashes: set[str] = set()
        self._experts: list[Experts] = []

    def __len__(self) -> int:
        return len(self._ids)

    def for_engine(self) -> NDArray[np.int32]:
        """Return the ids to continue; assert that they extend the tokens that the engine has seen
        and written."""
        if not np.array_equal(self._ids[: len(self._seen)], self._seen):
            raise PrefixBroken(f"the first {len(self._seen)} tokens have changed")
        return self._ids

    def add_completion(self, completion: Completion, temperature: float) -> None:
        """Append the policy's sampled tokens, unchanged."""
        self._ids = np.concatenate([self._ids, completion.token_ids])
        self._seen = self._ids.copy()
        self._logprobs.append(completion.logprobs)
        if completion.experts is not None:
            self._experts.append(completion.experts)
        self._spans += [
            Span(Author.FORCED, span.length)
            if span.policy is None
            else Span(Author.POLICY, span.length, span.policy, temperature)
            for span in completion.spans
        ]

    def add_observation(self, ids: Sequence[int]) -> None:
        """Append the environment's tokens. An observation that reaches the window ends there."""
        ids = ids[: self._window - len(self._ids)]
        self._ids = np.concatenate([self._ids, np.array(ids, dtype=np.int32)])
        self._spans.append(Span(Author.ENVIRONMENT, len(ids)))

    def keep_text(self, text: str, offset: int) -> str:
        """Keep a text that the policy saw in part or not at all as media of the token at `offset`,
        once; return its hash, or "" for one too many."""
        room = MOST_MEDIA_BYTES - sum(len(item.content) for item in self._media)
        kept = keep_whole(text, min(offset, len(self._ids) - 1), room)
        if kept.sha256 not in self._hashes:
            if len(self._media) >= MOST_KEPT:
                return ""
            self._media.append(kept)
            self._hashes.add(kept.sha256)
        return kept.sha256

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self._ids

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(map(len, self._logprobs))

    @property
    def known_experts(self) -> int:
        """Number of leading tokens whose experts the engine has named."""
        return sum(map(len, self._experts))

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for span in self._spans if span.length)

    @property
    def sequence(self) -> TokenSequence:
        """The tokens in the learner's format."""
        experts = np.concatenate(self._experts) if self._experts else None
        return TokenSequence(self._ids, self.spans, self.logprobs, tuple(self._media), experts)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Logprobs of only the policy's tokens, in order."""
        return np.concatenate(self._logprobs or [np.zeros(0, np.float32)])
