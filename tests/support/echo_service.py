"""A service with one method of each kind, for tests over real sockets; also a process to kill.

`python -m tests.support.echo_service LISTEN` serves until killed and prints its address.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import StringValue

from flotilla_common.rpc import rpc

TOKEN = "test-token-0123456789"
SERVICE = "test.Echo"
Unary = Callable[[StringValue, Any], Awaitable[StringValue]]


async def echo(request: StringValue, context: Any) -> StringValue:
    return request


async def count(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
    for index in range(int(request.value)):
        yield StringValue(value=str(index))


async def join(requests: AsyncIterator[StringValue], context: Any) -> StringValue:
    return StringValue(value=",".join([request.value async for request in requests]))


async def repeat(requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
    async for request in requests:
        yield request


async def hang(request: StringValue, context: Any) -> StringValue:
    await asyncio.sleep(3600)
    return request


def add(server: grpc.aio.Server, **unary: Unary) -> None:
    """Adds the service; `unary` are further methods, or replacements."""
    codec: dict[str, Any] = {
        "request_deserializer": StringValue.FromString,
        "response_serializer": StringValue.SerializeToString,
    }
    handlers: dict[str, Any] = {
        "Count": grpc.unary_stream_rpc_method_handler(count, **codec),
        "Join": grpc.stream_unary_rpc_method_handler(join, **codec),
        "Repeat": grpc.stream_stream_rpc_method_handler(repeat, **codec),
    }
    for name, method in {"Echo": echo, "Hang": hang, **unary}.items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(method, **codec)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def method(channel: grpc.aio.Channel, name: str, kind: str = "unary_unary") -> Any:
    """Return a callable for one method; requests in bytes are sent unchanged."""
    return getattr(channel, kind)(
        f"/{SERVICE}/{name}",
        request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        response_deserializer=StringValue.FromString,
    )


async def call(channel: grpc.aio.Channel, text: str, **options: Any) -> str:
    return (await method(channel, "Echo")(StringValue(value=text), **options)).value


async def _main(listen: str) -> None:
    server = rpc.server(token=TOKEN)
    add(server)
    async with rpc.serving(server, listen) as serving:
        print(serving.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
