"""The canary's tokens, with and without a picture."""

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from flotilla_common.images.made_pictures import noise_picture, plain_picture
from flotilla_common.images.placeholders import check_places
from flotilla_common.images.vision_family import VisionFamily
from flotilla_learner.rank.canary import canary_token_ids, insert_picture, without_tokens

FAMILY = VisionFamily(
    *("qwen3_vl", 16, 2, 2, 64 * 64, 1024 * 1024),
    *(151652, 151653, 151655, 151656, "digest"),
)


@pytest.mark.parametrize("vocab_size", [151_936, 151_657, 200_000])
def test_its_picture_stands_among_text_that_it_does_not_replace(vocab_size: int) -> None:
    text = canary_token_ids(vocab_size)
    ids, shown = insert_picture(text, noise_picture(), FAMILY)
    check_places(ids, [shown.place], FAMILY)
    assert len(ids) == len(text) + 2 + FAMILY.count(shown.place.grid)
    # Text behind it sees it.
    assert len(ids) - shown.place.offset > FAMILY.count(shown.place.grid) + 8
    left = ids[~np.isin(ids, FAMILY.banned_ids)]
    assert np.array_equal(left, without_tokens(text, FAMILY.banned_ids))


def test_banned_ids_become_others_that_are_in_the_vocabulary() -> None:
    ids = np.array([0, 1, 2, 3, 9, 10], np.int32)
    assert without_tokens(ids, (9, 2, 1)).tolist() == [0, 0, 0, 3, 8, 10]
    assert without_tokens(ids, (0, 3)).tolist() == [3 - 1, 1, 2, 2, 9, 10]
    assert without_tokens(ids, ()).tolist() == ids.tolist()


def test_the_noise_is_the_same_everywhere() -> None:
    picture = noise_picture()
    with Image.open(io.BytesIO(picture.data)) as opened:
        pixels = np.asarray(opened)
    assert pixels.shape == (64, 64, 3)
    # Of the pixels: their compression may differ between machines.
    known = "cbe8228a0a77"
    assert hashlib.sha256(pixels.tobytes()).hexdigest().startswith(known)
    assert pixels.std() > 70


def test_plain_pictures_differ_by_colour_alone() -> None:
    one, other = (plain_picture(40, 24, colour) for colour in (0, 1))
    assert (one.width, one.height) == (40, 24)
    assert one.sha256 != other.sha256
