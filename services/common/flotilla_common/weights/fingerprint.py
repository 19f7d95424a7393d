"""Digests that identify a policy publication: the numpy reference."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_LENGTH_MULTIPLIER = 0xD6E8FEB86659FD93
# Words per row, an even number, and the rows that fit a CPU's cache while they are summed.
_ROW_WORDS = 2**10
_CHUNK_ROWS = 2**7
# The dtypes of a WeightManifest, by torch's names.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a publication: its canonical Hugging Face name and the place of its bytes."""

    name: str
    # Named as in torch and the contract: float32, bfloat16, ...
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    checksum: int

    @property
    def size_bytes(self) -> int:
        """Raises KeyError for an unknown dtype."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def checksum64(data: NDArray[np.uint8]) -> int:
    """Return a 64-bit checksum of bytes that a GPU can compute as fast as it reads them.

    With w_i the little-endian 64-bit words of the zero-padded data, modulo 2^64:
    sum_i w_i * (((i + 1) * 0x9E3779B97F4A7C15) | 1) + nbytes * 0xD6E8FEB86659FD93.
    The multipliers are odd, so that any changed word changes the sum; they differ, so that swapped
    words do too. Not cryptographic: it detects accidents, and SHA-256 signs the list of sums."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    whole = flat.size // (8 * _ROW_WORDS) * _ROW_WORDS
    rest = np.zeros(-(-flat.size // 8) - whole, "<u8")
    rest.view(np.uint8)[: flat.size - 8 * whole] = flat[8 * whole :]
    total = _sum_rows(flat[: 8 * whole].view("<u8").reshape(-1, _ROW_WORDS))
    total += _weighted_sum(rest, whole)
    return (total + flat.size * _LENGTH_MULTIPLIER) & _MASK


def _sum_rows(words: NDArray[np.uint64]) -> int:
    """Return the weighted sum of whole rows, with one multiplication per row.

    A row has an even length, so `| 1` adds 1 to the multipliers of its odd places; the others are
    multiples of the first, and a word's index follows from its row and its place in it."""
    count, width = words.shape
    rows, places = np.empty(count, np.uint64), np.zeros(width, np.uint64)
    for start in range(0, count, _CHUNK_ROWS):
        chunk = words[start : start + _CHUNK_ROWS]
        np.add.reduce(chunk, axis=1, out=rows[start : start + _CHUNK_ROWS])
        places += np.add.reduce(chunk, axis=0)
    by_row = int(np.dot(rows, np.arange(count, dtype=np.uint64)))
    by_place = int(np.dot(places, np.arange(1, width + 1, dtype=np.uint64)))
    return (width * by_row + by_place) * _MULTIPLIER + int(places[1::2].sum(dtype=np.uint64))


def _weighted_sum(words: NDArray[np.uint64], start: int) -> int:
    index = np.arange(start + 1, start + 1 + words.size, dtype=np.uint64)
    multipliers = index * np.uint64(_MULTIPLIER) | np.uint64(1)
    return int(np.sum(words * multipliers, dtype=np.uint64))


def compute_fingerprint(entries: Sequence[TensorEntry], total_bytes: int) -> bytes:
    """Return SHA-256 over the manifest of a publication, in its order."""
    rows: list[Any] = [
        [entry.name, entry.dtype, list(entry.shape), entry.offset_bytes, entry.checksum]
        for entry in entries
    ]
    rows.append(total_bytes)
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True)
class TokenizerDigests:
    """Digests of a tokenizer.

    `whole` decides; the parts show what differs, and are empty if a side does not know them."""

    whole: bytes
    tokenizer_json: bytes = b""
    chat_template: bytes = b""

    def differing_parts(self, other: "TokenizerDigests") -> tuple[str, ...]:
        """Return the names of the parts that both sides know and that differ."""
        pairs = {
            "tokenizer.json": (self.tokenizer_json, other.tokenizer_json),
            "the chat template": (self.chat_template, other.chat_template),
        }
        return tuple(name for name, (own, its) in pairs.items() if own and its and own != its)


def tokenizer_digests(folder: Path) -> TokenizerDigests:
    """Return `tokenizer_digest`, and SHA-256 of each part. Raises FileNotFoundError."""
    return TokenizerDigests(
        tokenizer_digest(folder),
        hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest(),
        hashlib.sha256(_chat_template(folder).encode()).digest(),
    )


def tokenizer_digest(folder: Path) -> bytes:
    """Return SHA-256 of tokenizer.json and the chat template of a model folder.

    Two sides with the same digest turn the same messages into the same token ids. A missing
    template counts as empty. Raises FileNotFoundError without a tokenizer.json."""
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes())
    digest.update(b"\0")
    digest.update(_chat_template(folder).encode())
    return digest.digest()


def _chat_template(folder: Path) -> str:
    template = folder / "chat_template.jinja"
    if template.exists():
        return template.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.exists():
        return ""
    value = json.loads(config.read_text(encoding="utf-8")).get("chat_template") or ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
