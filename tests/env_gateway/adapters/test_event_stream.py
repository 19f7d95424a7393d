"""Events of a stream, whatever pieces they arrive in."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_common.text.parsing import TooLargeError
from flotilla_env_gateway.adapters.event_stream import Event, read_events

STREAM = (
    b": a comment\n\nid: 1\ndata:\n\ndata: one\ndata: two\n\nevent: endpoint\r\ndata:three\r\n\r\n"
    b"retry: 1500\nid: 2\n\ndata: unfinished"
)
EVENTS = [
    Event(data=[b""], event_id="1"),
    Event(data=[b"one", b"two"]),
    Event(kind="endpoint", data=[b"three"]),
    Event(event_id="2", retry_s=1.5),
]


def answer_of(pieces: Sequence[bytes]) -> Any:
    async def arrive() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return SimpleNamespace(content=SimpleNamespace(iter_any=arrive))


async def events_of(pieces: Sequence[bytes], max_bytes: int = 2**10) -> list[Event]:
    return [event async for event in read_events(answer_of(pieces), max_bytes)]


@given(cuts=st.sets(st.integers(1, len(STREAM) - 1)))
def test_events_are_the_same_in_any_pieces(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    assert asyncio.run(events_of(pieces)) == EVENTS


async def test_an_event_is_bounded_and_a_stream_is_not() -> None:
    assert len(await events_of([b"data: 12345\n\n"] * 1000, 100)) == 1000
    with pytest.raises(TooLargeError, match="more than 100 bytes"):
        await events_of([b"data: 12345\n"] * 1000, 100)


async def test_lines_let_others_in_between() -> None:
    reading = asyncio.create_task(events_of([b"\n" * 2**17], 2**20))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 200
