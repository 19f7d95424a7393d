"""Packs: several sequences laid end to end in one row, none seeing another.

Attention is causal within a segment and position ids start again at 0 in each, so a pack computes
exactly what its sequences would alone, without a padded token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Indices of the sequences in each pack of at most `budget` tokens.

    A pure function of its arguments, so every rank plans the same packs. A sequence longer than
    the budget gets a pack of its own. First-fit decreasing needs at most 11/9 of the smallest
    possible number of packs, plus one (Johnson 1973).
    """
    packs: list[list[int]] = []
    # As if all the packs were there that there can be: one for each sequence.
    room = np.full(len(lengths), budget, np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = room[: len(packs)] >= lengths[index]
        place = int(fits.argmax()) if fits.any() else len(packs)
        if place == len(packs):
            packs.append([])
        packs[place].append(index)
        room[place] -= lengths[index]
    return tuple(tuple(sorted(pack)) for pack in packs)


@dataclass(frozen=True, slots=True)
class PackLayout:
    """The places of the segments in a pack."""

    # Start of each segment and, last, the end of the pack: one longer than the segments.
    offsets: tuple[int, ...]
    # [tokens] int64, from 0 in every segment.
    position_ids: NDArray[np.int64]


def make_pack_layout(lengths: Sequence[int]) -> PackLayout:
    """Lay out segments of these lengths, in this order."""
    offsets = (0, *np.cumsum(lengths, dtype=np.int64).tolist())
    positions = [np.arange(length, dtype=np.int64) for length in lengths]
    return PackLayout(offsets, np.concatenate(positions) if positions else np.zeros(0, np.int64))
