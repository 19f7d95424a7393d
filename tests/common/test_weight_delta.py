"""Differences of publications: what comes out is what went in, whatever the bytes mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.common.weight_delta import (
    DamagedDeltaError,
    add_change,
    count_words,
    decode_change,
    encode_change,
    subtract_blocks,
)

Bytes = NDArray[np.uint8]


def carried_over(new: Bytes, old: Bytes) -> Bytes:
    """What arrives where `old` is held."""
    encoded = encode_change(subtract_blocks(new, old))
    return add_change(old, decode_change(encoded, count_words(old.size)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bytes, Bytes]:
    """Two blocks of one length, of which few or many bytes differ."""
    size = draw(st.integers(0, 3000))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = numbers.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    changed = numbers.random(size) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
    new[changed] = numbers.integers(0, 256, int(changed.sum()), dtype=np.uint8)
    return new, old


@given(pairs())
def test_a_block_of_any_bytes_and_length_is_carried_over(pair: tuple[Bytes, Bytes]) -> None:
    new, old = pair
    before = old.copy()
    assert np.array_equal(carried_over(new, old), new)
    assert np.array_equal(old, before)


def test_every_change_of_a_word_is_carried_over() -> None:
    """Every 16-bit pattern, NaN payloads, infinities and both zeros among them."""
    old = np.arange(2**16, dtype="<u2")
    for step in (1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        new = old + np.uint16(step)
        assert np.array_equal(carried_over(new.view(np.uint8), old.view(np.uint8)), new.view("u1"))


def test_float32_with_payloads_of_nan_is_carried_over() -> None:
    numbers = np.random.default_rng(0)
    old = numbers.standard_normal(5000).astype(np.float32)
    new = (old * np.float32(1 + 1e-5)).astype(np.float32)
    new[::7].view("<u4")[:] = 0x7FC00000 + np.arange(len(new[::7]), dtype="<u4")
    assert np.array_equal(carried_over(new.view(np.uint8), old.view(np.uint8)), new.view(np.uint8))


@given(pairs(), pairs())
def test_changes_in_turn_add_up_to_one(
    one: tuple[Bytes, Bytes], other: tuple[Bytes, Bytes]
) -> None:
    size = min(one[0].size, other[0].size)
    first, second, third = one[0][:size], one[1][:size], other[0][:size]
    both = subtract_blocks(second, first) + subtract_blocks(third, second)
    assert np.array_equal(add_change(first, both), third)


def test_distant_changes_are_found_again() -> None:
    """Gaps of every length around the one that takes another byte."""
    places = np.cumsum([0, 1, 253, 254, 255, 256, 257, 509, 510, 511, 512, 100_000])
    change = np.zeros(places[-1] + 300, np.uint16)
    change[places] = np.arange(1, len(places) + 1)
    assert np.array_equal(decode_change(encode_change(change), change.size), change)


@given(pairs(), st.data())
def test_damage_is_an_error_or_another_block_and_nothing_else(
    pair: tuple[Bytes, Bytes], data: st.DataObject
) -> None:
    new, old = pair
    encoded = bytearray(encode_change(subtract_blocks(new, old)))
    if data.draw(st.booleans()):
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    else:
        place = data.draw(st.integers(0, len(encoded) - 1))
        encoded[place] ^= data.draw(st.integers(1, 255))
    try:
        change = decode_change(bytes(encoded), count_words(old.size))
    except DamagedDeltaError:
        return
    assert change.shape == (count_words(old.size),)


def test_a_difference_that_says_too_much_is_refused() -> None:
    change = np.ones(1000, np.uint16)
    encoded = encode_change(change)
    with pytest.raises(DamagedDeltaError, match="1000 of 999 words"):
        decode_change(encoded, 999)
    one_place = np.zeros(1000, np.uint16)
    one_place[-1] = 1
    with pytest.raises(DamagedDeltaError, match="beyond the block"):
        decode_change(encode_change(one_place), 900)
    with pytest.raises(DamagedDeltaError):
        decode_change(encoded + b"x", 1000)
