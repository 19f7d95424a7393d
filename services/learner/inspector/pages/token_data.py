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
    "logprobs": ("logprobs", "<f4"),
    "trainer": ("trainer_logprobs", "<f4"),
    "advantages": ("advantages", "<f4"),
    "entropy": ("entropy", "<f4"),
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
        "runs": _runs(track, count),
        "texts": [visible(text) for text in texts],
        "arrays": {
            name: _encode(getattr(track, field)[:count], dtype)
            for name, (field, dtype) in _ARRAYS.items()
        },
    }


def _runs(track: TokenTrack, count: int) -> list[list[Any]]:
    """Return runs of tokens that share what rarely changes: [start, author, mask, run epoch,
    version, temperature or null]."""
    columns = (track.authors, track.mask, track.epochs, track.versions, track.temperatures)
    if not count:
        return []
    changed = np.zeros(count, np.bool_)
    changed[0] = True
    for column in columns:
        values = np.nan_to_num(column[:count], nan=-1.0)
        changed[1:] |= values[1:] != values[:-1]
    starts = np.flatnonzero(changed)
    rows = zip(starts, *(column[starts] for column in columns), strict=True)
    return [
        [int(start), int(author), int(mask), int(epoch), int(version), _finite(temperature)]
        for start, author, mask, epoch, version, temperature in rows
    ]


def _finite(value: np.float32) -> float | None:
    return None if np.isnan(value) else float(value)


def _encode(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()
