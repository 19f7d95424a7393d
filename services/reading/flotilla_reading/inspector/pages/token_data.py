"""Encoding of a token track for a page's script: a JSON object, then arrays of numbers.

Bytes 0 to 3 are the length of the JSON as a little-endian integer, a multiple of 4. After it come
the arrays listed in its `arrays`, each little-endian with 4 bytes a token. A page of 60,000 tokens
opens at once, because neither side turns numbers into text."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_reading.inspector.pages.visible_text import visible
from flotilla_reading.inspector.queries.token_tracks import AUTHORS, TokenTrack

# Most tokens that one page shows as text; the table has all of them.
MOST_TOKENS = 200_000
_ARRAYS = {
    "logprobs": "logprobs",
    "trainer": "trainer_logprobs",
    "advantages": "advantages",
    "entropy": "entropy",
    "weights": "weights",
}


def token_data(track: TokenTrack, texts: Sequence[str]) -> bytes:
    """Return the data of a token view, for as many tokens as there are `texts`.

    `words` are the distinct tokens, as id and text, and the first array is the word of each token.
    `pictures` are the runs of tokens, from one to before another, that each stand for one.
    Arrays without any numbers are left out."""
    count = len(texts)
    parts = [
        [part.start, min(part.length, count - part.start), AUTHORS.index(part.author), part.turn]
        for part in track.parts
        if part.start < count
    ]
    words: dict[tuple[int, str], int] = {}
    pairs = zip(track.token_ids[:count].tolist(), texts, strict=True)
    places = np.array([words.setdefault(pair, len(words)) for pair in pairs], "<i4")
    arrays = {name: getattr(track, field)[:count] for name, field in _ARRAYS.items()}
    sent = {name: values for name, values in arrays.items() if not np.isnan(values).all()}
    head = {
        "count": count,
        "left_out": len(track) - count,
        "parts": parts,
        "runs": _runs(track, count),
        "pictures": [[start, min(end, count)] for start, end in track.pictures if start < count],
        "words": [[token_id, visible(text)] for token_id, text in words],
        "arrays": list(sent),
    }
    return _pack(head, [places, *(np.ascontiguousarray(each, "<f4") for each in sent.values())])


def _pack(head: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return b"".join([len(text).to_bytes(4, "little"), text, *(each.tobytes() for each in arrays)])


def _runs(track: TokenTrack, count: int) -> list[list[Any]]:
    """Return runs of tokens with equal rarely changing values: [start, author, mask, run epoch,
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
