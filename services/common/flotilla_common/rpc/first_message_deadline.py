"""Deadline for the first message of each call."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from flotilla_common.rpc.errors import make_refusal

# gRPC buffers up to a whole message of each call that is read. So many calls may take their time
# to send it; further ones get a moment, which is enough for a message that was sent at all.
_MOST_SLOW = 128
_SLOW_S = 30.0
_MOMENT_S = 2.0


class FirstMessages:
    """Reader of the first messages of one server's calls."""

    def __init__(self) -> None:
        self._waiting = 0

    async def read(self, raw: AsyncIterator[bytes]) -> bytes | None:
        """Return the first message of a stream; None if the stream ends without one.

        Raises ServiceError STREAM_STALLED."""
        patience_s = _SLOW_S if self._waiting < _MOST_SLOW else _MOMENT_S
        self._waiting += 1
        try:
            async with asyncio.timeout(patience_s):
                return await anext(aiter(raw), None)
        except TimeoutError as error:
            message = f"no message within {patience_s:g} s; call again"
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise make_refusal(code, "STREAM_STALLED", message) from error
        finally:
            self._waiting -= 1
