"""The connection of a process to a gateway, in a separate thread.

All episodes of the process share it. It renews their leases even while the caller computes, or
blocks its own event loop.
"""

import asyncio
import threading
import uuid
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc as pb_grpc
from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.concurrency import cancel_tasks, raise_failure
from flotilla_common.rpc import rpc
from flotilla_common.rpc.network_addresses import check_dial
from flotilla_common.rpc.tls import Tls, read_tls
from flotilla_common.telemetry.log import get_logger

if TYPE_CHECKING:
    from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceAsyncStub

T = TypeVar("T")

_RENEW_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0

_log = get_logger(__name__)


class GatewayError(RuntimeError):
    """Refusal by the gateway, or failure to reach it."""


class GatewayConnection:
    """A connection with its own thread, in which submitted work runs; use `stub` only there."""

    stub: "EpisodeServiceAsyncStub"

    def __init__(self, address: str, token: str, tls: Tls | None) -> None:
        self.worker_id = f"client-{uuid.uuid4().hex}"
        self.users = 0
        self._leases: dict[str, float] = {}
        self._closing = BackgroundTasks()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="flotilla-gateway", daemon=True)
        self._thread.start()
        self.submit_coroutine(self._open_channel(address, token, tls)).result()

    def submit_coroutine(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def hold_lease(self, episode_id: str, ttl_s: float) -> None:
        """Renew the episode's lease until it is released."""
        self._leases[episode_id] = ttl_s
        self._held.set()

    async def release_episode(self, episode_id: str) -> None:
        """Close an episode. Best effort: if the close is lost, the episode ends with its lease."""
        self._leases.pop(episode_id, None)
        request = pb.CloseEpisodeRequest(episode_id=episode_id)
        try:
            await self.stub.CloseEpisode(request, timeout=_CLOSE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _log.warning("episode not closed", episode=episode_id, reason=rpc.describe_error(error))

    def start_release(self, episode_id: str) -> asyncio.Task[None]:
        """Start to close an episode, even if the caller is cancelled meanwhile. Only in the
        connection's thread."""
        return self._closing.start_task(self.release_episode(episode_id))

    def abandon_episode(self, episode_id: str) -> None:
        """Close an episode that is no longer referenced, without waiting."""
        self._loop.call_soon_threadsafe(self.start_release, episode_id)

    def close(self) -> None:
        """Close the connection once pending closes are done."""
        self.submit_coroutine(self._stop_loop())
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _open_channel(self, address: str, token: str, tls: Tls | None) -> None:
        self._channel = rpc.channel(address, token=token, tls=tls, peer="env_gateway")
        self.stub = cast("EpisodeServiceAsyncStub", pb_grpc.EpisodeServiceStub(self._channel))
        self._held = asyncio.Event()
        self._renewing = asyncio.create_task(self._keep_renewing())

    async def _stop_loop(self) -> None:
        await cancel_tasks([self._renewing])
        raise_failure([self._renewing])
        while self._closing.running:
            await asyncio.wait(self._closing.running)
        await self._channel.close()
        self._loop.stop()

    async def _keep_renewing(self) -> None:
        while True:
            await self._held.wait()
            await asyncio.sleep(min(self._leases.values(), default=0.0) / 3)
            if self._leases:
                await self._renew_leases()
            else:
                self._held.clear()

    async def _renew_leases(self) -> None:
        request = pb.RenewEpisodesRequest(worker_id=self.worker_id, episode_ids=list(self._leases))
        try:
            answer = await self.stub.RenewEpisodes(request, timeout=_RENEW_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # The next round retries; use will show episodes that expire meanwhile.
            _log.warning("episodes not renewed", reason=rpc.describe_error(error))
            return
        for episode_id in answer.lost_episode_ids:
            self._leases.pop(episode_id, None)


_connections: dict[tuple[str, str, Tls | None], GatewayConnection] = {}
_lock = threading.Lock()


# FLOTILLA_TLS can be read only once, as it is then removed.
_read_tls = cache(read_tls)


def load_gateway_tls(address: str, folder: str | Path | None) -> Tls | None:
    """Load the TLS identity of `folder`, else of FLOTILLA_TLS. Raises ConfigError if there is none
    and a gateway at `address` requires it."""
    tls = _read_tls(None if folder is None else Path(folder))
    check_dial(address, encrypted=tls is not None)
    return tls


def borrow_connection(address: str, token: str, tls: Tls | None = None) -> GatewayConnection:
    """Return the process's connection to a gateway; pass it to `return_connection` afterwards."""
    with _lock:
        key = (address, token, tls)
        connection = _connections.get(key)
        if connection is None:
            connection = _connections[key] = GatewayConnection(address, token, tls)
        connection.users += 1
        return connection


def return_connection(connection: GatewayConnection) -> None:
    """Return a borrowed connection; the last borrower closes it."""
    with _lock:
        connection.users -= 1
        last = connection.users == 0
        if last:
            for key in [key for key, known in _connections.items() if known is connection]:
                del _connections[key]
    if last:
        connection.close()
