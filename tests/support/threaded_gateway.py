"""A gateway on a real socket, in a thread of its own: its clients may block the test's."""

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.tls import Tls
from flotilla_env_gateway.api.episode_service import EpisodeService
from flotilla_env_gateway.episodes.gateway import Gateway
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import running

TOKEN = "threaded-token-0123456789"


@dataclass(slots=True)
class ServedGateway:
    """`gateway` belongs to the other thread: read it, and change nothing."""

    address: str
    gateway: Gateway
    backend: ScriptedBackend
    grader: FakeGrader


@contextmanager
def served(
    *,
    listen: str = "127.0.0.1:0",
    tls: Tls | None = None,
    make: Callable[[], Any] = ScriptedBackend,
    **changes: Any,
) -> Generator[ServedGateway]:
    grader = FakeGrader()
    started: Future[tuple[ServedGateway, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        backend = make()
        async with running(backend, grader, **changes) as gateway:
            server = rpc.server(token=TOKEN)
            service = EpisodeService(gateway, lambda: None)
            episode_service_pb2_grpc.add_EpisodeServiceServicer_to_server(service, server)
            async with rpc.serving(server, listen, tls=tls, grace_s=0.1) as at:
                stop = asyncio.Event()
                made = ServedGateway(at.address, gateway, backend, grader)
                started.set_result((made, asyncio.get_running_loop(), stop))
                await stop.wait()
        await backend.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    made, loop, stop = started.result(60.0)
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
