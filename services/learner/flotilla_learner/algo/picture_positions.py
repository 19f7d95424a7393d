"""Positions of tokens in time, height and width (M-RoPE), for sequences that show pictures.

Text counts on in all three; the tokens of a picture have their places in its grid, and text behind
it goes on after the picture's longer side."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla_common.images.picture import PlacedPicture
from flotilla_learner.algo.packing import Segments

Positions = NDArray[np.int64]


def pack_positions(segments: Segments, merge: int) -> Positions:
    """Return the positions [3, tokens] of segments end to end. One that continues another goes on
    after it. A token of a picture stands for `merge` x `merge` patches."""
    count = len(segments.token_ids)
    parents = segments.parents or [None] * count
    pictures = segments.pictures or [()] * count
    found: list[Positions] = [np.zeros((3, 0), np.int64)]
    ends: list[int] = []
    for length, parent, shown in zip(segments.lengths, parents, pictures, strict=True):
        start = 0 if parent is None else ends[parent]
        positions, end = _place_segment(length, shown, merge, start)
        found.append(positions)
        ends.append(end)
    return np.concatenate(found, axis=1)


def _place_segment(
    length: int, shown: Sequence[PlacedPicture], merge: int, start: int
) -> tuple[Positions, int]:
    """Return the positions of one segment from `start` on, and the first one after it."""
    parts: list[Positions] = []
    done = 0
    for place in shown:
        parts.append(_count_on(start, place.offset - done))
        start += place.offset - done
        grid = np.array(place.grid) // (1, merge, merge)
        parts.append(np.indices(tuple(grid)).reshape(3, -1) + start)
        start += int(grid[1:].max())
        done = place.offset + int(grid.prod())
    parts.append(_count_on(start, length - done))
    return np.concatenate(parts, axis=1), start + length - done


def _count_on(start: int, count: int) -> Positions:
    return np.tile(np.arange(start, start + count, dtype=np.int64), (3, 1))
