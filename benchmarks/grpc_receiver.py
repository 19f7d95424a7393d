"""The other side of bare gRPC: `python -m benchmarks.grpc_receiver`.

A server with the services' gRPC options answers each finished stream with one byte, without
parsing, checking or keeping anything. It prints its port."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from flotilla_common.rpc.rpc_options import SERVER_OPTIONS

SERVICE, METHOD = "flotilla.Benchmark", "Receive"


async def receive(parts: AsyncIterator[bytes], _context: object) -> bytes:
    async for _ in parts:
        pass
    return b"k"


async def main() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {METHOD: grpc.stream_unary_rpc_method_handler(receive)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
