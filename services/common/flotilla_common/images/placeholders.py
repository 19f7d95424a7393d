"""The tokens that stand for pictures in a sequence.

A chat template writes one `image_pad` for a picture. The model computes a run of them, one for each
of its features; this run is what is recorded and trained on."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flotilla_common.images.picture import Grid, Picture, PlacedPicture, ShownPicture
from flotilla_common.images.vision_family import VisionFamily

Ids = NDArray[np.int32]


def expand_pictures(
    ids: Sequence[int] | Ids, pictures: Sequence[Picture], family: VisionFamily
) -> tuple[Ids, list[ShownPicture]]:
    """Return ids with one `image_pad` for each picture as the model computes them, and where the
    pictures stand in them.

    Raises ValueError if their numbers differ, or if a picture cannot be scaled."""
    given = np.asarray(ids, np.int32)
    pads = np.flatnonzero(given == family.image_pad)
    if len(pads) != len(pictures):
        raise ValueError(f"{len(pads)} places for {len(pictures)} pictures")
    grids = [family.grid(picture.width, picture.height) for picture in pictures]
    counts = count_tokens(given, grids, family)
    starts = np.cumsum(counts) - counts
    shown = [
        ShownPicture(picture, PlacedPicture(picture.sha256, grid, int(starts[pad])))
        for picture, grid, pad in zip(pictures, grids, pads, strict=True)
    ]
    return np.repeat(given, counts), shown


def count_tokens(
    ids: Sequence[int] | Ids, grids: Sequence[Grid], family: VisionFamily
) -> NDArray[np.int64]:
    """Return for each id how many tokens the model computes for it: several for an `image_pad`,
    whose pictures have these grids, in order."""
    given = np.asarray(ids, np.int32)
    counts = np.ones(len(given), np.int64)
    counts[given == family.image_pad] = [family.count(grid) for grid in grids]
    return counts


def move_places(shown: Sequence[ShownPicture], tokens: int) -> list[ShownPicture]:
    """Return pictures whose places are so many tokens later."""
    return [
        replace(each, place=replace(each.place, offset=each.place.offset + tokens))
        for each in shown
    ]


def cut_at(room: int, places: Sequence[PlacedPicture], most: int, family: VisionFamily) -> int:
    """Return after how many tokens a text with pictures is cut that has room for `room` tokens and
    `most` pictures: before the mark that begins a picture, if not all of it fits."""
    for number, place in enumerate(places):
        if number >= most or place.offset + family.count(place.grid) > room:
            return min(room, place.offset - 1)
    return room


def collapse_pictures(ids: Ids, places: Sequence[PlacedPicture], family: VisionFamily) -> Ids:
    """Return a sequence with one `image_pad` for each picture, as an engine is given it."""
    kept = np.ones(len(ids), np.bool_)
    for place in places:
        kept[place.offset + 1 : place.offset + family.count(place.grid)] = False
    return ids[kept]


def check_places(ids: Ids, places: Sequence[PlacedPicture], family: VisionFamily) -> None:
    """Check that the runs of `image_pad` in a sequence are exactly its pictures'.

    Raises ValueError."""
    expected = np.zeros(len(ids), np.bool_)
    for place in places:
        end = place.offset + family.count(place.grid)
        if not 0 <= place.offset < end <= len(ids) or expected[place.offset : end].any():
            raise ValueError(
                f"a picture's run at {place.offset} of {end - place.offset} tokens"
                f" does not fit a sequence of {len(ids)}"
            )
        expected[place.offset : end] = True
    if not np.array_equal(expected, ids == family.image_pad):
        raise ValueError("the sequence's image tokens are not those of its pictures")
