"""Reading streams of requests: a stalled caller loses its slot."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any, TypeVar

M = TypeVar("M", bound=Any)

# Minimum bytes that a stream must deliver per `stall_s`, on average: a trickle of single bytes is
# not progress.
_LEAST_BYTES = 2**16
_HEAR_OUT_BYTES = 64 << 20
_HEAR_OUT_S = 1.0
_HEARD_OUT_AT_ONCE = 4


class StalledError(Exception):
    """A stream delivered nothing for too long, or almost nothing throughout."""


async def read_paced(parts: AsyncIterator[M], stall_s: float) -> AsyncGenerator[M]:
    """Yield the messages of a stream while they keep coming. Raises StalledError.

    The time that the reader spends on a message is not counted."""
    now = asyncio.get_running_loop().time
    iterator, received, begun = aiter(parts), 0, now()
    while True:
        until = min(now() + stall_s, begun + stall_s * (1 + received // _LEAST_BYTES))
        try:
            async with asyncio.timeout_at(until):
                part = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise StalledError(
                f"the stream stalled after {received} bytes; it may pause for {stall_s:g} s at"
                f" most, and must deliver {_LEAST_BYTES} bytes in that time on average"
            ) from error
        received += part.ByteSize()
        handed_over = now()
        yield part
        begun += now() - handed_over


class RefusedStreamDrain:
    """Bounded reader of data that refused callers are still sending.

    A call that is cut off while its caller writes may end as INTERNAL at the caller, without the
    reason; so may calls beyond the few that are drained at once."""

    def __init__(self) -> None:
        self._heard = 0

    async def drain_stream(self, parts: AsyncIterator[Any]) -> None:
        if self._heard >= _HEARD_OUT_AT_ONCE:
            return
        self._heard += 1
        left = _HEAR_OUT_BYTES
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEAR_OUT_S):
                    async for part in parts:
                        left -= part.ByteSize()
                        if left < 0:
                            return
        finally:
            self._heard -= 1
