"""Packs: several segments laid end to end in one row, isolated except for a shared prompt.

Attention is causal within a segment and position ids restart at 0 in each, so a pack computes
exactly what its sequences would alone, without padding. A segment may continue another, its
parent: it sees all of it, and its positions follow the parent's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.trajectory import Experts
from flotilla_common.images.picture import PlacedPicture


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the sequences in each pack of at most `budget` tokens.

    A pure function of its arguments, so every rank plans the same packs. A sequence longer than
    the budget gets a pack of its own. First-fit decreasing needs at most 11/9 of the smallest
    possible number of packs, plus one (Johnson 1973).
    """
    packs: list[list[int]] = []
    # Start with as many packs as there can be: one for each sequence.
    room = np.full(len(lengths), budget, np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = room[: len(packs)] >= lengths[index]
        place = int(fits.argmax()) if fits.any() else len(packs)
        if place == len(packs):
            packs.append([])
        packs[place].append(index)
        room[place] -= lengths[index]
    return tuple(tuple(sorted(pack)) for pack in packs)


def spread_evenly(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of the sequences of each of `count` shares.

    The longest first, each to the share with the fewest tokens so far: at most 4/3 of the best
    possible maximum (Graham 1969)."""
    loads = [0] * count
    shares: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = loads.index(min(loads))
        loads[least] += lengths[index]
        shares[least].append(index)
    return [sorted(share) for share in shares]


@dataclass(frozen=True, slots=True)
class Segments:
    """Token ids of the segments of a pack, in order."""

    token_ids: Sequence[NDArray[np.int32]]
    # See `PackLayout`; None: no segment continues another.
    parents: Sequence[int | None] | None = None
    # Chosen by the engine, for the first tokens of each; None if it reported none at all.
    experts: Sequence[Experts | None] | None = None
    # Shown in each, with their places in it; None: none shows any.
    pictures: Sequence[Sequence[PlacedPicture]] | None = None

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each segment."""
        return [len(ids) for ids in self.token_ids]


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Places of the segments in a pack."""

    # Start of each segment and, last, the end of the pack: one longer than the segments.
    offsets: tuple[int, ...]
    # The earlier segment that each one continues; None for those that start afresh.
    parents: tuple[int | None, ...]
    # [tokens] int64, from 0 in every segment without a parent.
    position_ids: NDArray[np.int64]


def make_pack_layout(
    lengths: Sequence[int], parents: Sequence[int | None] | None = None
) -> PackLayout:
    """Lay out segments of these lengths, in this order; without `parents` none continues another.

    A parent has no parent itself."""
    parents = tuple(parents or [None] * len(lengths))
    offsets = (0, *np.cumsum(lengths, dtype=np.int64).tolist())
    starts = [0 if parent is None else lengths[parent] for parent in parents]
    positions = [
        np.arange(start, start + length, dtype=np.int64)
        for start, length in zip(starts, lengths, strict=True)
    ]
    return PackLayout(offsets, parents, np.concatenate([np.zeros(0, np.int64), *positions]))
