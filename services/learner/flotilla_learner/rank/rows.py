"""Sequences up to their last policy token, and their mini-batches; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.trajectory import Candidates, Experts
from flotilla_common.images.picture import PlacedPicture
from flotilla_learner.algo.predicting_positions import predicting_positions
from flotilla_learner.types import TrainSequence

# One float32 array [policy tokens] by a row's place in the batch.
ByRow = dict[int, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence up to its last policy token; nothing after that token is trained on."""

    # Place in the batch.
    index: int
    token_ids: NDArray[np.int32]
    # Positions whose next token the policy wrote, one per policy token.
    positions: NDArray[np.int64]
    # Logprobs of the sampler, per policy token.
    behaviour: NDArray[np.float32]
    temperature: float
    staleness: int
    # Chosen by the engine, for the first tokens.
    experts: Experts | None = None
    # Most first tokens that other rows may share; None: those before the first policy token.
    prompt: int | None = None
    pictures: Sequence[PlacedPicture] = ()
    # What each policy token was sampled from; None: the whole vocabulary.
    candidates: Candidates | None = None

    @staticmethod
    def from_sequence(index: int, sequence: TrainSequence) -> "Row":
        """Cut a sequence after its last policy token.

        Raises ValueError if the policy wrote the first token, which nothing predicts."""
        positions = predicting_positions(sequence.policy_mask)
        end = int(positions[-1]) + 2 if len(positions) else 0
        return Row(
            index,
            sequence.token_ids[:end],
            positions,
            sequence.behaviour_logprobs[sequence.policy_mask].astype(np.float32, copy=False),
            sequence.temperature,
            sequence.staleness,
            sequence.experts,
            # A run holds no policy token, so it lies before the end or behind it.
            pictures=[place for place in sequence.pictures if place.offset < end],
            candidates=sequence.candidates,
        )


def split_groups(group_ids: Sequence[str], parts: int) -> list[list[int]]:
    """Return at most `parts` mini-batches of whole groups, in batch order, as even as possible.

    Each lists the places of its sequences in the batch.
    """
    groups: dict[str, list[int]] = {}
    for place, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(place)
    bounds = np.linspace(0, len(groups), min(parts, max(1, len(groups))) + 1).astype(int)
    ordered = list(groups.values())
    return [
        [place for group in ordered[start:end] for place in group]
        for start, end in pairwise(bounds)
    ]
