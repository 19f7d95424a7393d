"""The runtime that a service receives."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc.aio
import structlog

from flotilla_common.process.run_membership import ReplicaStatus
from flotilla_common.process.service_lifecycle import Lifecycle
from flotilla_common.rpc.peer_channels import Peers
from flotilla_common.rpc.rpc import Serving, serving
from flotilla_common.rpc.tls import Tls
from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_common.telemetry.watchdog import Watchdog

C = TypeVar("C", bound=ConfigModel)


@dataclass
class Runtime(Generic[C]):
    """Configuration, identity and environment of one service process.

    When `drain` is set, the service finishes its work in hand, takes nothing new and returns."""

    service: str
    config: C
    shared: SharedConfig
    # The whole run spec, other services' sections included.
    spec: dict[str, Any]
    run_id: str
    run_dir: Path
    token: str
    peers: Peers
    # None on loopback only.
    tls: Tls | None = None
    replica: int = 0
    # New for every process.
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    listen: str = "127.0.0.1:0"
    # Where others reach it, if not at the listen address.
    advertise: str | None = None
    drain: asyncio.Event = field(default_factory=asyncio.Event)
    watchdog: Watchdog = field(default_factory=Watchdog)
    log: structlog.stdlib.BoundLogger = field(default_factory=lambda: get_logger("flotilla"))
    # None outside a service process: status and announcements are then dropped.
    lifecycle: Lifecycle | None = None

    @property
    def worker_id(self) -> str:
        return f"{self.service}-{self.replica}"

    def report_status(self, status: Callable[[], ReplicaStatus]) -> None:
        """Send the result of `status` with each heartbeat."""
        if self.lifecycle is not None:
            self.lifecycle.status = status

    def hurry_heartbeat(self) -> None:
        """Send the next heartbeat now, for urgent changes. May be called from any thread."""
        if self.lifecycle is not None:
            self.lifecycle.hurry_heartbeat()

    def serving(self, server: grpc.aio.Server) -> AbstractAsyncContextManager[Serving]:
        """Serve at the command line's address, under the run's TLS if there is any."""
        return serving(server, self.listen, tls=self.tls, advertise=self.advertise)

    @property
    def launcher_metrics(self) -> Mapping[str, float]:
        """Metrics that only the launcher knows: `cost/*`."""
        return {} if self.lifecycle is None else self.lifecycle.launcher_metrics

    def loading(self) -> AbstractContextManager[None]:
        """Mark a long block before any work is in hand: a drain ends the process there."""
        return nullcontext() if self.lifecycle is None else self.lifecycle.loading()

    async def announce(self, address: str) -> None:
        """Register this replica at `address` with the launcher; heartbeats follow."""
        if self.lifecycle is not None:
            self.lifecycle.announce(address)
