"""A token track as a page's script reads it: JSON, whose arrays are base64 of little-endian
numbers."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.learner.inspector.pages.visible_text import visible
from services.learner.inspector.queries.token_tracks import AUTHORS, TokenTrack

# Tokens that one page shows as text; the table has all of them.
MOST_TOKENS = 200_000
_ARRAYS = {
    "ids": ("token_ids", "<i4"),
    "authors": ("authors", "u1"),
    "logprobs": ("logprobs", "<f4"),
    "trainer": ("trainer_logprobs", "<f4"),
    "advantages": ("advantages", "<f4"),
    "entropy": ("entropy", "<f4"),
    "mask": ("mask", "u1"),
    "versions": ("versions", "<i4"),
    "epochs": ("epochs", "<i4"),
    "temperatures": ("temperatures", "<f4"),
}


def token_data(track: TokenTrack, texts: Sequence[str]) -> dict[str, Any]:
    """Return the data of a token view: of as many tokens as there are `texts`."""
    count = len(texts)
    parts = [
        [part.start, min(part.length, count - part.start), AUTHORS.index(part.author), part.turn]
        for part in track.parts
        if part.start < count
    ]
    return {
        "count": count,
        "left_out": len(track) - count,
        "parts": parts,
        "texts": [visible(text) for text in texts],
        "arrays": {
            name: _encode(getattr(track, field)[:count], dtype)
            for name, (field, dtype) in _ARRAYS.items()
        },
    }


def _encode(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()
