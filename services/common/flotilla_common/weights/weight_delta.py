"""Lossless differences of successive publications: few 16-bit words change in a step, most by one,
and the smaller a weight, the likelier it changes.

A publication is cut into blocks of `BLOCK_BYTES`, each encoded separately. The format is described
in `protos/flotilla/learner/v1/weight_service.proto`."""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]
Places = NDArray[np.int64]

# Classes of words by their bfloat16 exponents. The bounds come from the first of so many parts of a
# block.
_CLASSES = 3
_SAMPLED = 8
_EXPONENT_SHIFT, _EXPONENT = 7, 0x7F80
# The bounds of classes, the changed words of each, and the lengths of three parts.
_HEAD = struct.Struct(f"<{_CLASSES - 1}B2x{_CLASSES}I3I")
# At most one word in so many has changed: the encoding takes at most a third of the block.
_SPARSE = 8
# Gap byte for so many unchanged words, continued in the next byte.
_ON = 255
# Deflate then starts a new Huffman code every 4096 symbols, so that each class gets its own.
_DEFLATE_MEMORY = 6


class DamagedDeltaError(ValueError):
    """The bytes are not an encoded difference."""


@dataclass(frozen=True, slots=True)
class Change:
    """An encoded difference of two blocks, and the data to undo it."""

    data: bytes
    # Words whose exponents change, and their old exponents.
    places: NDArray[np.uint32]
    exponents: Bytes

    @property
    def size_bytes(self) -> int:
        """Total bytes held."""
        return len(self.data) + self.places.nbytes + self.exponents.nbytes


def encode_change(new: Bytes, old: Bytes) -> Change | None:
    """Encode the difference from `old` to `new`, blocks of the same length; None if too many words
    change for it to pay off."""
    held = _as_words(old)
    exponents = _exponents(held)
    change = _as_words(new) - held
    if np.count_nonzero(change) > change.size // _SPARSE:
        return None
    sample = change.size // _SAMPLED
    bounds = _choose_bounds(exponents[:sample][change[:sample] != 0])
    places: list[Places] = []
    gaps: list[Places] = []
    for (left, within), bound in zip(_split(exponents, bounds), (*bounds, 0), strict=True):
        changed = np.flatnonzero(change[left] != 0)
        changed = changed[within[changed] >= bound]
        gaps.append(np.diff(changed, prepend=-1) - 1)
        places.append(_in_block(left, changed))
    changed = np.concatenate(places)
    values, before = change[changed], held[changed]
    parts = [_deflate(part) for part in (_encode_gaps(np.concatenate(gaps)), *_fold(values))]
    counts, lengths = [part.size for part in gaps], [len(part) for part in parts]
    data = _HEAD.pack(*bounds, *counts, *lengths) + b"".join(parts)
    crossed = np.flatnonzero((before ^ (before + values)) & _EXPONENT)
    return Change(data, changed[crossed].astype(np.uint32), _exponents(before[crossed]))


def apply_change(old: Bytes, data: bytes) -> Bytes:
    """Apply a difference to `old`, as the inverse of `encode_change`. Raises DamagedDeltaError."""
    words = _as_words(old).copy()
    places, values = _decode_change(data, _exponents(words))
    words[places] += values
    return words.view(np.uint8)[: old.size]


def undo_change(new: Bytes, change: Change) -> Bytes:
    """Return the block that the difference turned into `new`."""
    words = _as_words(new).copy()
    exponents = _exponents(words)
    exponents[change.places] = change.exponents
    places, values = _decode_change(change.data, exponents)
    words[places] -= values
    return words.view(np.uint8)[: new.size]


def _as_words(block: Bytes) -> Words:
    if block.size % 2:
        block = np.append(block, np.uint8(0))
    return block.view("<u2")


def _exponents(words: Words) -> Bytes:
    return (words >> _EXPONENT_SHIFT).astype(np.uint8)


def _choose_bounds(changed: Bytes) -> list[int]:
    """Return the exponents below which a half and a quarter of the changed words lie."""
    if not changed.size:
        return [0] * (_CLASSES - 1)
    ordered = np.sort(changed)
    return [int(ordered[ordered.size >> part]) for part in range(1, _CLASSES)]


def _split(exponents: Bytes, bounds: Sequence[int]) -> Iterator[tuple[Places | slice, Bytes]]:
    """Yield for each class the words outside earlier classes: their places in the block, and their
    exponents."""
    left: Places | slice = slice(None)
    for bound in bounds:
        yield left, exponents
        below = np.flatnonzero(exponents < bound)
        left, exponents = _in_block(left, below), exponents[below]
    yield left, exponents


def _in_block(left: Places | slice, places: Places) -> Places:
    """Convert places among the words left over into places in the block."""
    return places if isinstance(left, slice) else left[places]


def _join(parts: list[Places], exponents: Bytes, bounds: Sequence[int]) -> Places:
    """Join the places of all classes as places in the block. Raises DamagedDeltaError."""
    found: list[Places] = []
    for part, (left, within) in zip(parts, _split(exponents, bounds), strict=True):
        if part.size and part[-1] >= within.size:
            raise DamagedDeltaError("a place lies beyond the block")
        found.append(_in_block(left, part))
    return np.concatenate(found)


def _decode_change(data: bytes, exponents: Bytes) -> tuple[Places, Words]:
    """Return the places of the changed words, and their changes. Raises DamagedDeltaError."""
    if len(data) < _HEAD.size:
        raise DamagedDeltaError(f"{len(data)} bytes are too few for a difference")
    head = _HEAD.unpack_from(data)
    bounds, counts, (first, second, third) = (
        head[: _CLASSES - 1],
        head[_CLASSES - 1 : -3],
        head[-3:],
    )
    total, words = sum(counts), exponents.size
    if total > words:
        raise DamagedDeltaError(f"{total} of {words} words have changed")
    body = memoryview(data)[_HEAD.size :]
    if len(body) != first + second + third:
        raise DamagedDeltaError(f"{len(body)} bytes, not {first + second + third}")
    gaps = _inflate(body[:first], total + _CLASSES * (words // _ON))
    low = _inflate(body[first : first + second], total)
    high = _inflate(body[first + second :], total)
    if low.size != total or high.size != total:
        raise DamagedDeltaError("changes are missing")
    return _join(_decode_gaps(gaps, counts), exponents, bounds), _unfold(low, high)


def _fold(values: Words) -> tuple[Bytes, Bytes]:
    """Return the low and the high bytes of values, where 1, -1, 2, -2 ... become 0, 1, 2, 3 ...; no
    value is 0."""
    folded = ((values << 1) ^ -(values >> 15)) - np.uint16(1)
    return folded.astype(np.uint8), (folded >> 8).astype(np.uint8)


def _unfold(low: Bytes, high: Bytes) -> Words:
    folded = (low | high.astype(np.uint16) << 8) + np.uint16(1)
    change: NDArray[Any] = (folded >> 1) ^ -(folded & np.uint16(1))
    return change


def _encode_gaps(gaps: Places) -> Bytes:
    """Encode each gap as a run of `_ON` bytes and a byte with the rest."""
    long = gaps // _ON
    ends = np.cumsum(long + 1) - 1
    coded = np.full(ends[-1] + 1 if ends.size else 0, _ON, np.uint8)
    coded[ends] = gaps - long * _ON
    return coded


def _decode_gaps(coded: Bytes, counts: Sequence[int]) -> list[Places]:
    """Return the places of each class, given its number of words. Raises DamagedDeltaError."""
    ends, total = np.flatnonzero(coded != _ON), sum(counts)
    if ends.size != total or (coded.size and coded[-1] == _ON):
        raise DamagedDeltaError("places are missing")
    places = np.cumsum(coded, dtype=np.int64)[ends] + np.arange(total)
    parts = np.split(places, np.cumsum(counts)[:-1])
    start = 0
    for part in parts:
        if part.size:
            part -= start
            start += part[-1] + 1
    return parts


def _deflate(part: Bytes) -> bytes:
    # No search for repeats: there are only runs.
    packer = zlib.compressobj(
        1, zlib.DEFLATED, -zlib.MAX_WBITS, _DEFLATE_MEMORY, strategy=zlib.Z_RLE
    )
    return packer.compress(part.tobytes()) + packer.flush()


def _inflate(data: memoryview, most: int) -> Bytes:
    """Return the inflated data. Raises DamagedDeltaError if it exceeds `most` bytes."""
    packer = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # 0 would mean no limit.
        found = packer.decompress(data, most + 1)
    except zlib.error as error:
        raise DamagedDeltaError(f"not deflated: {error}") from error
    if len(found) > most or not packer.eof or packer.unused_data:
        raise DamagedDeltaError("a part does not have its stated length")
    return np.frombuffer(found, np.uint8)
