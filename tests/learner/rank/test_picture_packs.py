"""Packs of rows that show pictures: what is shared, what is cut, and what is kept."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_common.images.picture import PlacedPicture
from flotilla_common.images.pixels import Pixels
from flotilla_common.images.placeholders import check_places
from flotilla_common.images.vision_family import VisionFamily
from flotilla_learner.algo.prefix_sharing import LEAST_PREFIX, Prompted, cluster_by_prefix
from flotilla_learner.rank import pictures
from flotilla_learner.rank.packed_rows import Pack, RowCluster
from flotilla_learner.rank.pictures import PixelStore, key_pictures
from flotilla_learner.rank.rows import Row
from flotilla_learner.types import TrainSequence

FAMILY = VisionFamily("qwen3_vl", 16, 2, 2, 1, 10**6, 101, 102, 103, 104, "digest")
# Runs of 4 tokens and of 6.
SHOWN = {"a" * 64: (1, 4, 4), "b" * 64: (1, 4, 4), "c" * 64: (1, 6, 4)}


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Rows of which some begin alike, with pictures that stand among the same text."""
    pieces: list[Any] = [*SHOWN, np.full(5, 1, np.int32), np.full(9, 2, np.int32)]
    found: list[Row] = []
    for index in range(draw(st.integers(1, 8))):
        ids, places = [np.full(3, 9, np.int32)], list[PlacedPicture]()
        for piece in draw(st.lists(st.sampled_from(pieces), max_size=4)):
            if isinstance(piece, str):
                start = sum(map(len, ids)) + 1
                places.append(PlacedPicture(piece, SHOWN[piece], start))
                run = [103] * FAMILY.count(SHOWN[piece])
                piece = np.array([101, *run, 102], np.int32)
            ids.append(piece)
        prompt = sum(map(len, ids))
        ids.append(np.full(draw(st.integers(1, 5)), 7, np.int32))
        whole = np.concatenate(ids)
        positions = np.arange(prompt - 1, len(whole) - 1)
        logprobs = np.zeros(len(positions), np.float32)
        found.append(Row(index, whole, positions, logprobs, 1.0, 0, pictures=places))
    return found


@given(rows(), st.integers(1, 120))
def test_a_shared_prompt_never_ends_in_a_picture_and_shows_the_same(
    given_rows: list[Row], budget: int
) -> None:
    prompted = [
        Prompted(key_pictures(r.token_ids, r.pictures, FAMILY), int(r.positions[0]) + 1)
        for r in given_rows
    ]
    for cluster in cluster_by_prefix(prompted, budget):
        members = [given_rows[index] for index in cluster.members]
        assert cluster.prefix == 0 or cluster.prefix >= LEAST_PREFIX
        shared = {
            tuple(place for place in row.pictures if place.offset < cluster.prefix)
            for row in members
        }
        assert len(shared) == 1 or cluster.prefix == 0
        segments = Pack([RowCluster(members, cluster.prefix)]).segments
        assert segments.pictures is not None
        # Each segment's runs are whole, and are those of its own pictures.
        for ids, places in zip(segments.token_ids, segments.pictures, strict=True):
            check_places(ids, places, FAMILY)
        assert sum(map(len, segments.token_ids)) == cluster.tokens


def test_pictures_behind_the_last_policy_token_go_with_what_is_cut() -> None:
    run = [101, 103, 103, 103, 103, 102]
    ids = np.array([1, *run, 5, 6, *run, 8], np.int32)
    places = tuple(PlacedPicture("a" * 64, (1, 4, 4), offset) for offset in (2, 10))
    mask = np.zeros(len(ids), np.bool_)
    mask[7:9] = True
    sequence = TrainSequence("g", 0, 1.0, ids, mask, np.zeros(len(ids), np.float32), 1.0, 0)
    row = Row.from_sequence(0, replace(sequence, pictures=places))
    assert len(row.token_ids) == 9
    assert list(row.pictures) == [places[0]]
    check_places(row.token_ids, row.pictures, FAMILY)


class _Reader:
    """Makes pixels of any bytes, and counts them."""

    def __init__(self) -> None:
        self.read_files: list[bytes] = []

    def read(self, data: bytes) -> Pixels:
        self.read_files.append(data)
        return Pixels(np.zeros((16, 8), np.float32), (1, 4, 4))


def test_pixels_are_made_once_while_they_fit_and_the_least_used_go(monkeypatch: Any) -> None:
    monkeypatch.setattr(pictures, "_KEPT_BYTES", 2 * 16 * 8 * 4)
    reader: Any = _Reader()
    store = PixelStore(reader)
    places = {name: PlacedPicture(name * 64, (1, 4, 4), 0) for name in "abc"}
    with store.holding({place.sha256: name.encode() for name, place in places.items()}):
        for name in "ababcbca":
            store.find(places[name])
    assert reader.read_files == [b"a", b"b", b"c", b"a"]
    # A batch that holds the same within another leaves them there.
    with store.holding({"a" * 64: b"a"}):
        with store.holding({"a" * 64: b"a", "b" * 64: b"b"}):
            store.find(places["b"])
        store.find(places["a"])


def test_pixels_of_the_next_pack_are_begun_before_it_and_errors_come_with_it() -> None:
    reader: Any = _Reader()
    store = PixelStore(reader)
    right, wrong = (
        PlacedPicture(name * 64, (1, side, 4), 0) for name, side in (("a", 4), ("b", 6))
    )
    with store.holding({right.sha256: b"a", wrong.sha256: b"b"}):
        store.expect([right, wrong, right])
        store.expect([right])
        assert store.find(right) is store.find(right)
        with pytest.raises(ValueError, match="1x4x4 patches here, and 1x6x4"):
            store.find(wrong)
    assert sorted(reader.read_files) == [b"a", b"b"]
    with store.holding({}), pytest.raises(ValueError, match="without its bytes"):
        store.find(right)
