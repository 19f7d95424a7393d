"""Lossless differences of publications that follow one another: few 16-bit words change in a step,
most by one.

A publication is cut into blocks of `BLOCK_BYTES`, each encoded by itself. The format is told in
`protos/flotilla/learner/v1/weight_service.proto`."""

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]

# The number of changed words, and the lengths of the first two of three deflated parts.
_HEAD = struct.Struct("<III")
# One word of so many has changed, or fewer: it takes a third of the block at most.
_SPARSE = 8
# A byte of the gaps that says: so many more unchanged words, and the next byte goes on.
_ON = 255


class DamagedDeltaError(ValueError):
    """Bytes that no difference is encoded as."""


def subtract_blocks(new: Bytes, old: Bytes) -> Words:
    """Return the change of each 16-bit word, modulo 2^16, of blocks of the same length.

    First those at even places, then those at odd ones: the halves of a float32 change unlike each
    other. A last odd byte is a word with 0."""
    change = _as_words(new) - _as_words(old)
    return np.concatenate([change[0::2], change[1::2]])


def add_change(old: Bytes, change: Words) -> Bytes:
    """Return the block that `change` makes of `old`; the inverse of `subtract_blocks`."""
    words = _as_words(old).copy()
    half = (words.size + 1) // 2
    words[0::2] += change[:half]
    words[1::2] += change[half:]
    return words.view(np.uint8)[: old.size]


def count_words(size: int) -> int:
    """Return the number of words of a block of `size` bytes."""
    return -(-size // 2)


def is_sparse(change: Words) -> bool:
    """Return True where few enough words change for a difference to be worth its making."""
    return int(np.count_nonzero(change)) <= change.size // _SPARSE


def encode_change(change: Words) -> bytes:
    """Encode what `subtract_blocks` returned."""
    places = np.flatnonzero(change != 0)
    values = change[places]
    # 1, -1, 2, -2 ... are 0, 1, 2, 3 ...: none is 0.
    folded = ((values << 1) ^ -(values >> 15)) - np.uint16(1)
    parts = [_deflate(part) for part in (_encode_gaps(places), folded & 0xFF, folded >> 8)]
    return _HEAD.pack(places.size, len(parts[0]), len(parts[1])) + b"".join(parts)


def decode_change(data: bytes, words: int) -> Words:
    """Decode what `encode_change` encoded of so many words. Raises DamagedDeltaError."""
    if len(data) < _HEAD.size:
        raise DamagedDeltaError(f"{len(data)} bytes, too few for a difference")
    count, first, second = _HEAD.unpack_from(data)
    if count > words:
        raise DamagedDeltaError(f"{count} of {words} words have changed")
    body = memoryview(data)[_HEAD.size :]
    gaps = _inflate(body[:first], count + words // _ON)
    low = _inflate(body[first : first + second], count)
    high = _inflate(body[first + second :], count)
    if low.size != count or high.size != count:
        raise DamagedDeltaError("changes are missing")
    folded = (low | high.astype(np.uint16) << 8) + np.uint16(1)
    change = np.zeros(words, np.uint16)
    change[_decode_gaps(gaps, count, words)] = (folded >> 1) ^ -(folded & np.uint16(1))
    return change


def _as_words(block: Bytes) -> Words:
    if block.size % 2:
        block = np.append(block, np.uint8(0))
    return block.view("<u2")


def _encode_gaps(places: NDArray[np.int64]) -> Bytes:
    """Return the unchanged words before each changed one: `_ON` for each so many, and the rest."""
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // _ON + 1) - 1
    coded = np.full(ends[-1] + 1 if ends.size else 0, _ON, np.uint8)
    coded[ends] = gaps % _ON
    return coded


def _decode_gaps(coded: Bytes, count: int, words: int) -> NDArray[np.int64]:
    ends = np.flatnonzero(coded != _ON)
    if ends.size != count or (coded.size and coded[-1] == _ON):
        raise DamagedDeltaError("places are missing")
    places = np.cumsum(coded, dtype=np.int64)[ends] + np.arange(count)
    if count and places[-1] >= words:
        raise DamagedDeltaError("a place lies beyond the block")
    return places


def _deflate(part: NDArray[Any]) -> bytes:
    # No search for repeats, of which there are none but runs.
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_RLE)
    return packer.compress(part.astype(np.uint8).tobytes()) + packer.flush()


def _inflate(data: memoryview, most: int) -> Bytes:
    """Return what was deflated. Raises DamagedDeltaError where it is more than `most` bytes."""
    packer = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # 0 would be no limit.
        found = packer.decompress(data, most + 1)
    except zlib.error as error:
        raise DamagedDeltaError(f"not deflated: {error}") from error
    if len(found) > most or not packer.eof or packer.unused_data:
        raise DamagedDeltaError("a part is not as long as it says")
    return np.frombuffer(found, np.uint8)
