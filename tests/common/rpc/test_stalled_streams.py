"""A stream that must keep coming."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from flotilla_common.rpc.stalled_streams import StalledError, read_paced


class Part:
    def __init__(self, size: int) -> None:
        self._size = size

    def ByteSize(self) -> int:
        return self._size


async def stream(*pauses_and_sizes: tuple[float, int]) -> AsyncIterator[Part]:
    for pause, size in pauses_and_sizes:
        await asyncio.sleep(pause)
        yield Part(size)


async def taken(parts: AsyncIterator[Part], stall_s: float, each_s: float = 0.0) -> Sequence[int]:
    sizes: list[int] = []
    async for part in read_paced(parts, stall_s):
        await asyncio.sleep(each_s)
        sizes.append(part.ByteSize())
    return sizes


async def test_a_stream_that_keeps_coming_is_read_to_its_end() -> None:
    assert await taken(stream(*[(0.01, 2**16)] * 20), 0.15) == [2**16] * 20


async def test_a_stream_that_stops_is_ended() -> None:
    with pytest.raises(StalledError, match="stalled after 5 bytes"):
        await taken(stream((0, 5), (60, 5)), 0.05)


async def test_single_bytes_now_and_then_are_no_progress() -> None:
    with pytest.raises(StalledError):
        await taken(stream(*[(0.01, 1)] * 1000), 0.1)


async def test_a_stream_is_not_blamed_for_the_time_of_its_reader() -> None:
    assert await taken(stream(*[(0, 1)] * 4), 0.1, each_s=0.06) == [1] * 4
