"""A relay in front of a service, which cuts all of its connections again and again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from flotilla_common.aio.background_tasks import BackgroundTasks


class Relay:
    """Passes bytes on between its callers and the service at `address`."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        self._open -= {writer, back}

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                target.write(data)
                await target.drain()
        target.transport.abort()

    async def keep_cutting(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.cuts += bool(self._open)
            for writer in self._open:
                writer.transport.abort()


@asynccontextmanager
async def run_relay(address: str, cut_every_s: float) -> AsyncGenerator[tuple[str, Relay]]:
    """Yield the relay's own address, and the relay."""
    relay, tasks = Relay(address), BackgroundTasks()
    # Tasks that the server starts itself log their cancellation as an error (Python 3.11).
    server = await asyncio.start_server(
        lambda *streams: tasks.start_task(relay.join(*streams)), "127.0.0.1", 0
    )
    cutting = tasks.start_task(relay.keep_cutting(cut_every_s))
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", relay
    finally:
        cutting.cancel()
        server.close()
