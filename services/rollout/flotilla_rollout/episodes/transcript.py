"""The growing tokens of one attempt: appended, never rebuilt."""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import MOST_MEDIA_BYTES, Candidates, Experts, Media
from flotilla_common.domain.trajectory import Sequence as TokenSequence
from flotilla_common.images.picture import ShownPicture
from flotilla_common.images.placeholders import cut_at, move_places
from flotilla_common.images.vision_family import VisionFamily
from flotilla_rollout.episodes.observation_cut import keep_whole
from flotilla_rollout.types import Completion

# Texts of media; the learner takes four times as many items, pictures among them.
MOST_KEPT = 1024


class PrefixBroken(AssertionError):
    """The engine's next tokens do not start with those that it saw before."""


class Transcript:
    """Token ids with their authors; policy tokens carry logprobs and the policy that wrote them.

    What the environment writes is cut at `window`, or before the first of more than `most_pictures`
    pictures: a longer sequence is no policy's input. With pictures there is a `family`."""

    def __init__(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        window: int = sys.maxsize,
        pictures: Sequence[ShownPicture] = (),
        *,
        family: VisionFamily | None = None,
        most_pictures: int = sys.maxsize,
    ) -> None:
        self._window = window
        self._family = family
        self._most_pictures = most_pictures
        # True once the environment has written what the policy cannot read any more.
        self.is_cut = False
        self._ids = np.zeros(0, np.int32)
        self._seen = self._ids
        self._spans: list[Span] = []
        # Those that stand in the ids, in order.
        self.pictures: list[ShownPicture] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._media: list[Media] = []
        self._hashes: set[str] = set()
        self._experts: list[Experts] = []
        self._candidates: list[Candidates] = []
        self._add_written(prompt_ids, pictures, Author.PROMPT)

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
        if completion.candidates is not None:
            self._candidates.append(completion.candidates)
        self._spans += [
            Span(Author.FORCED, span.length)
            if span.policy is None
            else Span(Author.POLICY, span.length, span.policy, temperature)
            for span in completion.spans
        ]

    def add_observation(
        self, ids: Sequence[int] | NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
    ) -> None:
        """Append the environment's tokens, and the pictures whose places are in them. An
        observation that reaches the window ends there, or before a picture that does not fit."""
        self._add_written(ids, pictures, Author.ENVIRONMENT)

    def _add_written(
        self,
        ids: Sequence[int] | NDArray[np.int32],
        pictures: Sequence[ShownPicture],
        author: Author,
    ) -> None:
        room = self._window - len(self._ids)
        if self._family is not None:
            places = [each.place for each in pictures]
            room = cut_at(room, places, self._most_pictures - len(self.pictures), self._family)
        self.is_cut = self.is_cut or room < len(ids)
        shown = [each for each in pictures if each.place.offset < room]
        self.pictures += move_places(shown, len(self._ids))
        kept = np.array(ids[:room], np.int32)
        self._ids = np.concatenate([self._ids, kept])
        self._spans.append(Span(author, len(kept)))

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
        media = (*map(self._describe, self.pictures), *self._media)
        candidates = np.concatenate(self._candidates) if self._candidates else None
        return TokenSequence(
            self._ids, self.spans, self.logprobs, media, experts, candidates=candidates
        )

    @property
    def files(self) -> Mapping[str, bytes]:
        """Bytes of the pictures, by hash."""
        return {each.picture.sha256: each.picture.data for each in self.pictures}

    def _describe(self, shown: ShownPicture) -> Media:
        assert self._family is not None
        picture, place = shown.picture, shown.place
        return Media(
            picture.sha256,
            picture.mime,
            place.grid,
            place.offset,
            self._family.processor_digest,
            len(picture.data),
        )

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Logprobs of only the policy's tokens, in order."""
        return np.concatenate(self._logprobs or [np.zeros(0, np.float32)])
