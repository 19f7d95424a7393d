"""The canary: tokens that engine and trainer score at each publication; no torch."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from flotilla_common.images.picture import Picture, ShownPicture
from flotilla_common.images.placeholders import expand_pictures
from flotilla_common.images.vision_family import VisionFamily

CANARY_TOKENS = 32
# The text before its picture; that behind it sees the picture.
_BEFORE_PICTURE = 8


def canary_token_ids(vocab_size: int) -> np.ndarray:
    """Return token ids [32] int32, spread over the vocabulary; a function of its size."""
    golden = 0.6180339887498949
    spots = (np.arange(1, CANARY_TOKENS + 1, dtype=np.float64) * golden) % 1.0
    return (spots * vocab_size).astype(np.int32)


def insert_picture(
    token_ids: NDArray[np.int32], picture: Picture, family: VisionFamily
) -> tuple[NDArray[np.int32], ShownPicture]:
    """Return a canary's tokens with a picture among them, and its place."""
    ids = without_tokens(token_ids, family.banned_ids)
    whole = np.insert(ids, _BEFORE_PICTURE, np.array(family.picture_ids, np.int32))
    expanded, (shown,) = expand_pictures(whole, [picture], family)
    return expanded, shown


def without_tokens(token_ids: NDArray[np.int32], banned: Collection[int]) -> NDArray[np.int32]:
    """Return ids in which each banned one is replaced by the next lower one that is not."""
    found = token_ids.copy()
    while (wrong := np.isin(found, list(banned))).any():
        found[wrong] = np.where(found[wrong] == 0, len(banned) + 1, found[wrong] - 1)
    return found
