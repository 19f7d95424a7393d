"""Checksums and digests: equal for equal bytes, different for every accident."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flotilla_common.process.host_identity import host_digest
from flotilla_common.weights import fingerprint as module
from flotilla_common.weights.fingerprint import (
    TensorEntry,
    checksum64,
    compute_fingerprint,
    tokenizer_digest,
)

MASK = 2**64 - 1


def reference(data: bytes) -> int:
    """The formula, word by word in Python integers."""
    padded = data + bytes(-len(data) % 8)
    total = len(data) * 0xD6E8FEB86659FD93
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little")
        total += word * (((index + 1) * 0x9E3779B97F4A7C15 & MASK) | 1)
    return total & MASK


def array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


@given(st.binary(max_size=200))
def test_the_checksum_is_the_formula(data: bytes) -> None:
    assert checksum64(array(data)) == reference(data)


@pytest.mark.parametrize(("row_words", "chunk_rows"), [(2, 1), (4, 3), (6, 100)])
def test_rows_and_chunks_do_not_change_the_checksum(
    monkeypatch: pytest.MonkeyPatch, row_words: int, chunk_rows: int
) -> None:
    data = array(np.random.default_rng(0).bytes(8 * 100 + 3))
    whole = checksum64(data)
    monkeypatch.setattr(module, "_ROW_WORDS", row_words)
    monkeypatch.setattr(module, "_CHUNK_ROWS", chunk_rows)
    assert checksum64(data) == whole == reference(data.tobytes())


def test_the_checksum_of_many_rows_is_the_formula() -> None:
    data = np.random.default_rng(0).bytes(8 * 1024 * 200 + 13)
    assert checksum64(array(data)) == reference(data)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 511), st.integers(0, 7))
def test_one_changed_bit_changes_the_checksum(data: bytes, place: int, bit: int) -> None:
    changed = bytearray(data)
    changed[place % len(data)] ^= 1 << bit
    assert checksum64(array(bytes(changed))) != checksum64(array(data))


def test_swapped_words_and_added_zeros_change_the_checksum() -> None:
    words = np.arange(1, 5, dtype="<u8")
    swapped = words[[1, 0, 2, 3]]
    assert checksum64(words.view(np.uint8)) != checksum64(swapped.view(np.uint8))
    assert checksum64(array(b"a")) != checksum64(array(b"a\0"))


def test_an_unaligned_or_strided_view_is_summed_as_its_bytes() -> None:
    data = np.arange(100, dtype=np.uint8)
    assert checksum64(data[3:]) == checksum64(data[3:].copy())
    assert checksum64(data[::2]) == checksum64(data[::2].copy())


ENTRY = TensorEntry("model.norm.weight", "float32", (2, 3), 128, 2**64 - 1)


def test_the_fingerprint_is_the_digest_of_a_known_text() -> None:
    text = '[["model.norm.weight","float32",[2,3],128,18446744073709551615],152]'
    assert compute_fingerprint([ENTRY], 152) == hashlib.sha256(text.encode()).digest()


def test_every_field_order_and_size_count() -> None:
    changes = [
        TensorEntry("x", "float32", (2, 3), 128, 1),
        TensorEntry("model.norm.weight", "bfloat16", (2, 3), 128, 1),
        TensorEntry("model.norm.weight", "float32", (3, 2), 128, 1),
        TensorEntry("model.norm.weight", "float32", (2, 3), 0, 1),
        ENTRY,
    ]
    digests = {compute_fingerprint([entry], 152) for entry in changes}
    digests |= {compute_fingerprint(changes, 152), compute_fingerprint(changes[::-1], 152)}
    assert len(digests | {compute_fingerprint([ENTRY], 153)}) == 8


def test_the_tokenizer_digest_follows_tokens_and_template(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tokenizer_digest(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    bare = tokenizer_digest(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A"}))
    inside = tokenizer_digest(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("A")
    assert tokenizer_digest(tmp_path) == inside != bare
    (tmp_path / "chat_template.jinja").write_text("B")
    changed = tokenizer_digest(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert len({bare, inside, changed, tokenizer_digest(tmp_path)}) == 4


def test_the_host_digest_is_stable_and_a_digest() -> None:
    assert host_digest() == host_digest()
    assert len(host_digest()) == 32
