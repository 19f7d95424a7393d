"""Differences of publications: the output equals the input, for any bytes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flotilla_common.weights.weight_delta import (
    Change,
    DamagedDeltaError,
    apply_change,
    encode_change,
    undo_change,
)

Bytes = NDArray[np.uint8]


def encoded(new: Bytes, old: Bytes) -> Change:
    change = encode_change(new, old)
    assert change is not None
    return change


def assert_carried(new: Bytes, old: Bytes) -> None:
    """`new` arrives where `old` is held, `new` leads back to it, and both are as they were."""
    kept = new.copy(), old.copy()
    change = encoded(new, old)
    assert np.array_equal(apply_change(old, change.data), kept[0])
    assert np.array_equal(undo_change(new, change), kept[1])
    assert np.array_equal(new, kept[0])
    assert np.array_equal(old, kept[1])


def of_words(words: NDArray[Any]) -> Bytes:
    return words.astype("<u2").view(np.uint8)


def as_bfloat16(values: NDArray[Any]) -> Bytes:
    return of_words((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16)


def stepped(size: int, rate: float) -> tuple[Bytes, Bytes]:
    """Weights as bfloat16 after a step that moves each by `rate`, and before it."""
    numbers = np.random.default_rng(0)
    weights = (numbers.standard_normal(size) * 0.02).astype(np.float32)
    moved = weights + np.float32(rate) * numbers.choice([-1, 1], size).astype(np.float32)
    return as_bfloat16(moved), as_bfloat16(weights)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bytes, Bytes]:
    """Two blocks of one length, of which an eighth of the words differs at most, by anything."""
    size = draw(st.integers(16, 3000))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = numbers.integers(0, 256, size, dtype=np.uint8)
    # Of few exponents, or of all.
    old[1::2] &= draw(st.sampled_from([0x00, 0x80, 0x83, 0xFF]))
    new = old.copy()
    words = size // 2
    some = numbers.permutation(words)[: draw(st.integers(0, words // 8))]
    new[: 2 * words].view("<u2")[some] = numbers.integers(0, 2**16, some.size, dtype=np.uint16)
    return new, old


@given(pairs())
def test_a_block_of_any_bytes_and_length_is_carried_over_and_back(
    pair: tuple[Bytes, Bytes],
) -> None:
    assert_carried(*pair)


def test_every_change_of_a_word_is_carried_over() -> None:
    """Every 16-bit pattern, NaN payloads, infinities and both zeros among them."""
    words = np.arange(2**16, dtype="<u2")
    for step in (1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        for first in range(8):
            new = words.copy()
            new[first::8] += np.uint16(step)
            assert_carried(of_words(new), of_words(words))


def test_float32_with_payloads_of_nan_is_carried_over() -> None:
    numbers = np.random.default_rng(0)
    old = numbers.standard_normal(5000).astype(np.float32)
    old[::7].view("<u4")[:] = 0x7FC00000 + np.arange(len(old[::7]), dtype="<u4")
    new = old.copy()
    new[::4] *= np.float32(1 + 1e-5)
    assert_carried(new.view(np.uint8), old.view(np.uint8))


def test_a_step_that_moves_every_weight_by_the_rate_takes_0_036_bytes_a_weight() -> None:
    new, old = stepped(2**19, 1e-6)
    assert_carried(new, old)
    change = encoded(new, old)
    assert len(change.data) < 0.036 * 2**19
    assert change.size_bytes < 0.04 * 2**19


def test_a_block_that_has_not_changed_takes_a_few_bytes() -> None:
    _, old = stepped(2**19, 0.0)
    assert len(encoded(old, old).data) < 50


def test_a_block_of_which_more_than_an_eighth_has_changed_has_no_difference() -> None:
    old = np.zeros(800, np.uint16)
    new = old.copy()
    new[:100] = 1
    assert_carried(of_words(new), of_words(old))
    new[100] = 1
    assert encode_change(of_words(new), of_words(old)) is None


def test_distant_changes_are_found_again() -> None:
    """Gaps of every length around the one that takes another byte, within a class and across."""
    places = np.cumsum([0, 1, 253, 254, 255, 256, 257, 509, 510, 511, 512, 100_000])
    for exponents in (np.zeros(1, np.uint16), np.arange(12, dtype=np.uint16) << 7):
        old = np.resize(exponents, places[-1] + 300)
        new = old.copy()
        new[places] += np.arange(1, len(places) + 1, dtype=np.uint16)
        assert_carried(of_words(new), of_words(old))


@given(pairs(), st.data())
def test_damage_is_an_error_or_another_block_and_nothing_else(
    pair: tuple[Bytes, Bytes], data: st.DataObject
) -> None:
    new, old = pair
    sent = bytearray(encoded(new, old).data)
    if data.draw(st.booleans()):
        del sent[data.draw(st.integers(0, len(sent) - 1)) :]
    else:
        sent[data.draw(st.integers(0, len(sent) - 1))] ^= data.draw(st.integers(1, 255))
    kept = old.copy()
    try:
        block = apply_change(old, bytes(sent))
    except DamagedDeltaError:
        return
    finally:
        assert np.array_equal(old, kept)
    assert block.shape == old.shape


@given(pairs(), pairs())
def test_a_difference_of_other_weights_is_an_error_or_another_block(
    one: tuple[Bytes, Bytes], other: tuple[Bytes, Bytes]
) -> None:
    sent = encoded(*one).data
    try:
        assert apply_change(other[1], sent).shape == other[1].shape
    except DamagedDeltaError:
        return


def test_a_difference_that_contains_too_much_is_refused() -> None:
    old = np.zeros(1000, np.uint16)
    new = old.copy()
    new[900:] = 1
    sent = encoded(of_words(new), of_words(old)).data
    with pytest.raises(DamagedDeltaError, match="100 of 99 words"):
        apply_change(of_words(old[:99]), sent)
    with pytest.raises(DamagedDeltaError, match="beyond the block"):
        apply_change(of_words(old[:999]), sent)
    with pytest.raises(DamagedDeltaError, match="bytes, not"):
        apply_change(of_words(old), sent + b"x")
    with pytest.raises(DamagedDeltaError, match="too few"):
        apply_change(of_words(old), b"")
