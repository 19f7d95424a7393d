"""Every rpc of every contract, found by its descriptors, and a server that answers them all."""

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import grpc
import grpc.aio

import flotilla


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method: its path, and which sides stream."""

    path: str
    streams_requests: bool
    streams_responses: bool

    @property
    def kind(self) -> str:
        sides = (self.streams_requests, self.streams_responses)
        return "_".join("stream" if streams else "unary" for streams in sides)


@cache
def rpcs() -> tuple[Rpc, ...]:
    """Return the rpcs of all contracts; health is not among them."""
    found: list[Rpc] = []
    for module in pkgutil.walk_packages(flotilla.__path__, "flotilla."):
        if not module.name.endswith("_pb2"):
            continue
        file: Any = importlib.import_module(module.name).DESCRIPTOR
        for service in file.services_by_name.values():
            found += [
                Rpc(f"/{service.full_name}/{m.name}", m.client_streaming, m.server_streaming)
                for m in service.methods
            ]
    return tuple(found)


def of_service(*names: str) -> tuple[Rpc, ...]:
    """Return the rpcs of the services named, as in GroupService."""
    return tuple(rpc for rpc in rpcs() if rpc.path.split("/")[1].rpartition(".")[2] in names)


class Recorder:
    """Handlers for all rpcs that only remember that they were reached."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        for rpc in rpcs():
            _, service, method = rpc.path.split("/")
            handlers = {method: self._handler(rpc)}
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )

    def _handler(self, rpc: Rpc) -> Any:
        async def one(request: Any, context: Any) -> bytes:
            self.reached.append(rpc.path)
            return b""

        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            self.reached.append(rpc.path)
            yield b""

        make = getattr(grpc, f"{rpc.kind}_rpc_method_handler")
        return make(many if rpc.streams_responses else one, _as_it_is, _as_it_is)


async def refusals(
    channel: grpc.aio.Channel, given: Collection[Rpc], *, token: str | None = None
) -> dict[str, grpc.StatusCode]:
    """Return how each rpc ends that does not end well, when called with an empty message, or a
    stream of none."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    codes: dict[str, grpc.StatusCode] = {}
    for rpc in given:
        try:
            await _called(channel, rpc, metadata)
        except grpc.aio.AioRpcError as error:
            codes[rpc.path] = error.code()
    return codes


async def _called(channel: grpc.aio.Channel, rpc: Rpc, metadata: Any) -> None:
    method = getattr(channel, rpc.kind)(rpc.path)
    request = _silence() if rpc.streams_requests else b""
    call = method(request, metadata=metadata, timeout=5.0)
    if not rpc.streams_responses:
        await call
        return
    async for _ in call:
        continue


async def _silence() -> AsyncIterator[bytes]:
    """A caller that is refused as it writes may see INTERNAL, which is gRPC's own."""
    await asyncio.Event().wait()
    yield b""


def _as_it_is(message: bytes) -> bytes:
    return message
