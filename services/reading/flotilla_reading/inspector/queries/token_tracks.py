"""Token tracks: every token of a sequence with all its known values, as parallel arrays."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.token_authors import Author, Span, policy_mask
from flotilla_common.domain.trajectory import Sequence as TokenSequence
from flotilla_common.run_folder.token_stats import SequenceStats

AUTHORS = (Author.PROMPT, Author.POLICY, Author.ENVIRONMENT, Author.FORCED)
MASKED_OUT, TRAINED, NOT_OURS, UNKNOWN = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class TrackPart:
    """A run of tokens of one turn: tokens [start, start + length). Turns count from 1; 0 is the
    part before the first."""

    start: int
    length: int
    author: Author
    turn: int


@dataclass(frozen=True, slots=True)
class TokenTrack:
    """One sequence. Arrays are [tokens]; missing values are NaN, and versions -1."""

    token_ids: NDArray[np.int32]
    authors: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    trainer_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    entropy: NDArray[np.float32]
    # Weights that corrections gave the tokens' loss; 0 if they masked it.
    weights: NDArray[np.float32]
    # MASKED_OUT, TRAINED, NOT_OURS, or UNKNOWN if no statistics are kept.
    mask: NDArray[np.uint8]
    versions: NDArray[np.int32]
    epochs: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    parts: tuple[TrackPart, ...]
    # Tokens [start, end) that stand for each picture.
    pictures: tuple[tuple[int, int], ...]
    # Reason why the trainer's values are missing, or why it did not train on this; else "".
    note: str

    def __len__(self) -> int:
        return len(self.token_ids)


def make_track(sequence: TokenSequence, stats: SequenceStats | None, note: str) -> TokenTrack:
    """Align the engine's values and, if kept, the trainer's with the tokens."""
    mask = policy_mask(sequence.spans)
    spans, lengths = sequence.spans, [span.length for span in sequence.spans]
    count = len(sequence.token_ids)
    if stats is not None and len(stats.advantages) != int(mask.sum()):
        stats, note = None, "the kept statistics are of another length"

    def spread(values: NDArray[np.floating] | None) -> NDArray[np.float32]:
        whole = np.full(count, np.nan, np.float32)
        if values is not None:
            whole[mask] = values
        return whole

    return TokenTrack(
        token_ids=np.asarray(sequence.token_ids, np.int32),
        authors=np.repeat(
            np.array([AUTHORS.index(span.author) for span in spans], np.uint8), lengths
        ),
        logprobs=spread(sequence.logprobs),
        trainer_logprobs=spread(stats.logprobs if stats else None),
        advantages=spread(stats.advantages if stats else None),
        entropy=spread(stats.entropy if stats else None),
        weights=spread(stats.weights if stats else None),
        mask=_mask_codes(mask, stats),
        versions=_per_token(spans, lengths, lambda s: s.policy.version if s.policy else -1),
        epochs=_per_token(spans, lengths, lambda s: s.policy.run_epoch if s.policy else -1),
        temperatures=np.repeat(
            np.array(
                [np.nan if s.temperature is None else s.temperature for s in spans], np.float32
            ),
            lengths,
        ),
        parts=split_parts(spans),
        pictures=tuple(_picture_runs(sequence)),
        note=note or (stats.why_not if stats else ""),
    )


def split_parts(spans: Sequence[Span]) -> tuple[TrackPart, ...]:
    """Join adjacent spans of one author; a turn begins where the policy begins to write."""
    parts: list[TrackPart] = []
    start, turn, in_turn = 0, 0, False
    for span in spans:
        ours = span.author in (Author.POLICY, Author.FORCED)
        turn += ours and not in_turn
        in_turn = ours
        last = parts[-1] if parts else None
        if last and last.author is span.author and last.turn == turn:
            parts[-1] = TrackPart(last.start, last.length + span.length, last.author, turn)
        elif span.length:
            parts.append(TrackPart(start, span.length, span.author, turn))
        start += span.length
    return tuple(parts)


def _picture_runs(sequence: TokenSequence) -> Iterator[tuple[int, int]]:
    ids, count = sequence.token_ids, len(sequence.token_ids)
    for start in (item.token_offset for item in sequence.pictures):
        if start < count:
            others = np.flatnonzero(ids[start:] != ids[start])
            yield start, start + int(others[0]) if len(others) else count


def _mask_codes(mask: NDArray[np.bool_], stats: SequenceStats | None) -> NDArray[np.uint8]:
    codes = np.full(len(mask), NOT_OURS, np.uint8)
    codes[mask] = UNKNOWN if stats is None else TRAINED if stats.trained else MASKED_OUT
    if stats is not None:
        codes[np.flatnonzero(mask)[stats.weights == 0]] = MASKED_OUT
    return codes


def _per_token(
    spans: Sequence[Span], lengths: Sequence[int], value: Callable[[Span], int]
) -> NDArray[np.int32]:
    return np.repeat(np.array([value(span) for span in spans], np.int32), lengths)
