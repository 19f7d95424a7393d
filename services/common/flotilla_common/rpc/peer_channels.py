"""Channels to the other services of a run, which follow their current addresses."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.rpc.channel import CallDefaults, Channel
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.rpc import DEFAULT_STREAM_TIMEOUT_S, DEFAULT_TIMEOUT_S, plain_channel
from flotilla_common.rpc.tls import Tls, likely_cause
from flotilla_common.telemetry.log import get_logger

_RETRY_S = 1.0
_RESOLVE_TIMEOUT_S = 3600.0
# A call without its own deadline may still run this long on an abandoned channel.
_OLD_CHANNEL_GRACE_S = 120.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RegistryContract:
    """The generated stub class and messages module of flotilla.launcher.v1.RegistryService, passed
    in by a composition root."""

    stub: Callable[[Any], Any]
    messages: Any


class Peers:
    """Channels to services, found by fixed addresses, else by the registry.

    A caller stays with one replica of a service as long as that replica is registered; callers with
    different `replica` numbers are spread over them."""

    def __init__(
        self,
        *,
        token: str,
        run_id: str,
        replica: int = 0,
        fixed: Mapping[str, str] | None = None,
        registry: RegistryContract | None = None,
        registry_channel: grpc.aio.Channel | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._token = token
        self._tls = tls
        self._run_id = run_id
        self._replica = replica
        self._fixed = dict(fixed or {})
        self._registry = registry
        self._registry_channel = registry_channel
        self._peers: dict[str, _Peer] = {}

    async def channel(
        self,
        service: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stream_timeout_s: float = DEFAULT_STREAM_TIMEOUT_S,
    ) -> grpc.aio.Channel:
        """Return a channel to `service`; wait until the service is known.

        The channel follows the service to new addresses, so its stubs stay valid. Calls behave as
        on `rpc.channel`, except that with a registry a call to a service that has gone fails with
        UNAVAILABLE after some seconds instead of waiting: the next call may already reach its
        successor. Raises ConfigError if nothing can resolve `service`, or if it is beyond loopback
        and there is no TLS."""
        peer = self._peers.get(service)
        if peer is None:
            peer = self._peers[service] = self._resolve(service)
        await peer.known.wait()
        if peer.refusal is not None:
            raise peer.refusal
        defaults = CallDefaults(self._token, timeout_s, stream_timeout_s)
        return Channel(peer.current, defaults)

    async def address(self, service: str) -> str:
        """Return the current host:port of `service`; wait until it is known.

        Raises ConfigError, see `channel`."""
        await self.channel(service)
        return self._peers[service].address

    async def close(self) -> None:
        """Close every channel; calls still running on them are cancelled."""
        for peer in self._peers.values():
            await peer.close()

    def _resolve(self, service: str) -> "_Peer":
        peer = _Peer(service, self._tls)
        if service in self._fixed:
            peer.move(self._fixed[service], wait_for_ready=True)
        elif self._registry is not None and self._registry_channel is not None:
            peer.task = asyncio.create_task(self._follow_registry(peer), name=f"resolve-{service}")
        else:
            raise ConfigError(
                f"cannot resolve the service {service}: pass --peer {service}=HOST:PORT, or"
                " --registry HOST:PORT"
            )
        return peer

    async def _follow_registry(self, peer: "_Peer") -> None:
        assert self._registry is not None
        stub = self._registry.stub(self._registry_channel)
        request = self._registry.messages.ResolvePeersRequest(
            run_id=self._run_id, service=peer.service
        )
        while True:
            try:
                async for response in stub.ResolvePeers(request, timeout=_RESOLVE_TIMEOUT_S):
                    self._choose(peer, {entry.replica: entry.address for entry in response.peers})
            except grpc.aio.AioRpcError as error:
                code, cause = error.code().name, likely_cause(error.details())
                _log.debug("cannot resolve a peer", peer=peer.service, code=code, cause=cause)
            except ConfigError as error:
                peer.refuse(error)
                return
            await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.0))

    def _choose(self, peer: "_Peer", addresses: Mapping[int, str]) -> None:
        if not addresses:
            return  # it may come back where it was
        replica = peer.replica
        if replica is None or replica not in addresses:
            replicas = sorted(addresses)
            replica = peer.replica = replicas[self._replica % len(replicas)]
        peer.move(addresses[replica], wait_for_ready=False)


class _Peer:
    """One service: its current address, and the channel to it."""

    def __init__(self, service: str, tls: Tls | None) -> None:
        self.service = service
        self._tls = tls
        # Why it must not be called at its address.
        self.refusal: ConfigError | None = None
        self.replica: int | None = None
        self.known = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._address: str | None = None
        self._channel: grpc.aio.Channel | None = None
        self._closing = BackgroundTasks()

    def current(self) -> grpc.aio.Channel:
        assert self._channel is not None, "known is set before any caller gets a channel"
        return self._channel

    @property
    def address(self) -> str:
        assert self._address is not None, "known is set before any caller gets the address"
        return self._address

    def move(self, address: str, *, wait_for_ready: bool) -> None:
        if address == self._address:
            return
        old = self._channel
        self._channel = plain_channel(
            address, wait_for_ready=wait_for_ready, tls=self._tls, peer=self.service
        )
        self._address = address
        self.known.set()
        named = self.service if self.replica is None else f"{self.service}-{self.replica}"
        _log.info("found a peer", peer=named, address=address)
        if old is not None:
            self._closing.start_task(old.close(_OLD_CHANNEL_GRACE_S))

    def refuse(self, refusal: ConfigError) -> None:
        """Refuse the peer to every caller from now on."""
        _log.error("a peer may not be called", peer=self.service, error=str(refusal))
        self.refusal = refusal
        self.known.set()

    async def close(self) -> None:
        tasks = [task for task in (self.task, *self._closing.running) if task is not None]
        await cancel_tasks(tasks)
        if self._channel is not None:
            await self._channel.close()
