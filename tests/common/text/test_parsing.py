"""Outside text is measured before anything is built from it."""

import asyncio
import gc
import json
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_common.text.parsing import (
    ParseError,
    TextLimits,
    TooLargeError,
    parse_json,
    parse_json_aside,
    parse_literal,
)

LIMITS = TextLimits(bytes=2**24, values=2**16)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters() | st.sampled_from('\\",:[]{}\ud800')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(JSON, st.booleans(), st.booleans())
@settings(deadline=None)
def test_what_is_within_the_limits_is_parsed_as_ever(
    value: Any, ascii_only: bool, strict: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text, LIMITS, strict=strict) == value
    assert parse_json(text.encode("utf-8", "surrogatepass"), LIMITS) == value


def values_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + values_in(item) for item in value.values())
    return 1 + sum(map(values_in, value)) if isinstance(value, list) else 1


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, inner), default=0) if isinstance(value, dict | list) else 0


@given(JSON, st.integers(1, 40), st.integers(0, 5))
@settings(deadline=None)
def test_the_count_of_values_and_depth_is_that_of_what_is_built(
    value: Any, most: int, depth: int
) -> None:
    limits = TextLimits(bytes=2**20, values=most, depth=depth)
    if values_in(value) > 2 * most or depth_of(value) > depth:
        with pytest.raises(TooLargeError):
            parse_json(json.dumps(value), limits)
    elif 2 * values_in(value) < most and depth_of(value) <= depth:
        assert parse_json(json.dumps(value), limits) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested more than 100 deep|values"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "nested more than 100 deep"),
        ("[" + "[]," * 2**20 + "1]", "more than 65536 values"),
        ("[" + '"",' * 2**20 + "1]", "more than 65536 values"),
        ('{"a":1,' * 2**18, "more than 65536 values"),
        ("1" * 513, "an integer of 513 digits is too long; 512 are allowed"),
        ("1" * 2**20, "an integer of 1048576 digits"),
        (" " * (2**24 + 1), "16777217 bytes, more than 16777216"),
        ('{"a"', "Expecting ':' delimiter"),
        (b'"\xff"', "can't decode byte 0xff"),
        (b"\x00\x00\x00[", "Expecting value|null"),
    ],
    ids=lambda value: repr(value)[:20],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_too_much_is_refused_before_it_is_built(
    text: str | bytes, message: str, strict: bool
) -> None:
    began = time.process_time()
    with pytest.raises(ParseError, match=message):
        parse_json(text, LIMITS, strict=strict)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "the key 'a' is repeated"),
        ("[1e999]", "1e999 is too large for a number"),
        ("[NaN]", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
    ],
)
def test_a_strict_text_has_one_meaning(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse_json(text, LIMITS, strict=True)
    parse_json(text, LIMITS)


def test_a_repeated_key_behind_many_others_is_found_in_one_pass() -> None:
    pairs = ",".join(f'"k{number}":1' for number in range(30_000))
    began = time.process_time()
    with pytest.raises(ParseError, match="the key 'k29999' is repeated"):
        parse_json(f'{{{pairs},"k29999":1}}', LIMITS, strict=True)
    assert time.process_time() - began < 2.0


def test_brackets_and_commas_in_a_long_string_are_no_values() -> None:
    text = json.dumps({"text": 'a,b:[{"\\' * 2**18})
    assert len(parse_json(text, LIMITS)["text"]) == 8 * 2**18


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "-" * 30_000 + "1", "{[]: 1}", "1" * 30_000, "a", "\0", "[1,", "'\ud800"],
    ids=lambda text: text[:8],
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_literal(text, TextLimits(bytes=2**15, values=4096))


def test_a_literal_is_bounded() -> None:
    limits = TextLimits(bytes=100, values=5)
    assert parse_literal("['a', ('b', 1.5)]", limits) == ["a", ("b", 1.5)]
    with pytest.raises(TooLargeError, match="more than 5 values"):
        parse_literal("[1,2,3,4,5,6]", limits)
    with pytest.raises(TooLargeError, match="102 bytes, more than 100"):
        parse_literal("'" + "a" * 100 + "'", limits)


def test_a_literal_that_python_warns_of_is_no_warning_of_ours() -> None:
    assert parse_literal(r"'\d'", TextLimits(bytes=100, values=5)) == r"\d"


ANSWERS = TextLimits(bytes=2**24, values=2**18)
LONG = {
    "lists": b"[" + b"[]," * 130_000 + b"1]",
    "objects": b"[" + b'{"":0},' * 87_000 + b"1]",
    "floats": b"[" + b"1.5e300," * 262_000 + b"1]",
    "integers": b"[" + (b"1" * 512 + b",") * 30_000 + b"1]",
    "a string": b'"' + b"a,b:[{" * (2**24 // 6 - 9) + b'"',
    "escapes": b'"' + b"\\n" * (2**23 - 9) + b'"',
    "too many": b"[" * 2**24,
    "too many strings": b"[" + b'"a",' * 2**22,
}


def seconds_to_parse() -> float:
    """CPU seconds of the slowest text within the limits, which Python parses in one go."""
    started = time.process_time()
    json.loads(LONG["floats"])
    return time.process_time() - started


@pytest.mark.parametrize("name", LONG)
async def test_a_long_text_is_parsed_while_the_event_loop_continues(name: str) -> None:
    """Measured in CPU time of the process, which does little else."""
    one_parse_s = max(seconds_to_parse() for _ in range(3))
    gc.collect()
    gc.freeze()
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        last = time.process_time()
        while True:
            await asyncio.sleep(0.0005)
            now = time.process_time()
            longest_s, last = max(longest_s, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    with suppress(TooLargeError):
        await parse_json_aside(LONG[name], ANSWERS)
    await asyncio.sleep(0.01)
    ticking.cancel()
    assert longest_s < 3 * one_parse_s


def test_quotation_marks_alone_take_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match="more than 65536 values"):
            parse_json(b"[" * 101 + b'"' * 2**22, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
