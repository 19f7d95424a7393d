"""Positions of tokens that stand for pictures, and of text behind them."""

import numpy as np

from flotilla_common.images.picture import PlacedPicture
from flotilla_learner.algo.packing import Segments, make_pack_layout
from flotilla_learner.algo.picture_positions import pack_positions


def tokens(length: int) -> np.ndarray:
    return np.zeros(length, np.int32)


def test_a_picture_has_places_in_its_grid_and_text_goes_on_behind_its_longer_side() -> None:
    # 2 x 3 tokens of 2 x 2 patches, after 2 tokens of text.
    shown = PlacedPicture("a", (1, 4, 6), 2)
    found = pack_positions(Segments([tokens(10)], pictures=[[shown]]), merge=2)
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_each_sequence_begins_at_0_and_a_follower_where_its_parent_ends() -> None:
    shown = PlacedPicture("a", (1, 4, 4), 1)
    segments = Segments(
        [tokens(6), tokens(2), tokens(5), tokens(3)],
        [None, 0, 0, None],
        pictures=[[shown], [], [shown], []],
    )
    first, follower, second, last = np.split(pack_positions(segments, merge=2), [6, 8, 13], axis=1)
    assert first[0].tolist() == [0, 1, 1, 1, 1, 3]
    assert follower.tolist() == [[4, 5]] * 3
    assert second[2].tolist() == [4, 5, 6, 5, 6]
    assert last.tolist() == [[0, 1, 2]] * 3


def test_without_pictures_they_are_those_of_text() -> None:
    lengths, parents = [5, 3, 4, 2], [None, 0, 0, None]
    segments = Segments([tokens(length) for length in lengths], parents)
    plan = make_pack_layout(lengths, parents)
    assert np.array_equal(pack_positions(segments, merge=2), np.tile(plan.position_ids, (3, 1)))
