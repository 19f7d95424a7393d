"""Digests that identify a policy publication: the numpy reference."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_LENGTH_MULTIPLIER = 0xD6E8FEB86659FD93
# Words at a time: the multipliers of one chunk take 512 KiB and stay in cache.
_CHUNK_WORDS = 2**16


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a publication: its canonical Hugging Face name and where its bytes lie."""

    name: str
    # In torch's words, as in the contract: float32, bfloat16, ...
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    checksum: int


def checksum64(data: NDArray[np.uint8]) -> int:
    """Return a 64-bit checksum of bytes that a GPU can compute as fast as it reads them.

    With w_i the little-endian 64-bit words of the zero-padded data, modulo 2^64:
    sum_i w_i * (((i + 1) * 0x9E3779B97F4A7C15) | 1) + nbytes * 0xD6E8FEB86659FD93.
    The multipliers are odd, so that every changed word changes the sum; they differ, so that
    swapped words do. Not cryptographic: it finds accidents, and SHA-256 signs the list of sums."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    whole = flat.size // 8 * 8
    words = flat[:whole].view("<u8")
    total = flat.size * _LENGTH_MULTIPLIER
    for start in range(0, words.size, _CHUNK_WORDS):
        total += _weighted_sum(words[start : start + _CHUNK_WORDS], start)
    if whole < flat.size:
        last = np.zeros(8, np.uint8)
        last[: flat.size - whole] = flat[whole:]
        total += _weighted_sum(last.view("<u8"), words.size)
    return total & _MASK


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

    `whole` decides; the parts, empty where a side does not know them, say what differs."""

    whole: bytes
    tokenizer_json: bytes = b""
    chat_template: bytes = b""

    def differing_parts(self, other: "TokenizerDigests") -> tuple[str, ...]:
        """Return the names of the parts that both sides know and that are not the same."""
        pairs = {
            "tokenizer.json": (self.tokenizer_json, other.tokenizer_json),
            "the chat template": (self.chat_template, other.chat_template),
        }
        return tuple(name for name, (own, its) in pairs.items() if own and its and own != its)


def tokenizer_digests(folder: Path) -> TokenizerDigests:
    """Return `tokenizer_digest`, and SHA-256 of each part alone. Raises FileNotFoundError."""
    return TokenizerDigests(
        tokenizer_digest(folder),
        hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest(),
        hashlib.sha256(_chat_template(folder).encode()).digest(),
    )


def tokenizer_digest(folder: Path) -> bytes:
    """Return SHA-256 of tokenizer.json and the chat template of a model folder.

    Two sides with the same digest turn the same messages into the same token ids. Raises
    FileNotFoundError without a tokenizer.json; a tokenizer without a template has an empty one."""
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
