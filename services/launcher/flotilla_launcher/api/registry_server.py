"""Registry server of each run: on its own port, accepting only the run's own token."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from flotilla_common.process.arguments import TOKEN_VARIABLE
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.tls import TLS_VARIABLE
from flotilla_common.telemetry import log
from flotilla_common.text.redaction import add_secret
from flotilla_launcher.backends.local.own_address import route_address
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.security import certificates
from flotilla_launcher.security.certificates import RunIdentity

_GRACE_S = 1.0
_log = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GrpcRegistry:
    """Address at which a run's replicas register, and the secrets that admit them.
    `encrypted`: parts of the run are reached from other machines, so replicas need
    certificates."""

    address: str
    member: RunIdentity
    encrypted: bool

    def secrets_for(self, service: str) -> dict[str, str]:
        token = {TOKEN_VARIABLE: self.member.token}
        if not self.encrypted:
            return token
        return {**token, TLS_VARIABLE: self.member.tls_for(service).to_text()}


class GrpcRegistryHost:
    """Host of the runs' registries. `add` adds the registry of a run to its server."""

    def __init__(self, runs: Path, add: Callable[[str, grpc.aio.Server], None]) -> None:
        self._runs = runs
        self._add = add
        self._open: dict[str, AsyncExitStack] = {}

    async def open_registry(
        self, run_id: str, config: LauncherConfig, remembered: str
    ) -> GrpcRegistry:
        known = certificates.load_identity(self._runs, run_id)
        member = known or certificates.mint_identity(run_id)
        if known is None:
            certificates.store_identity(self._runs, member)
        for secret in (member.token, *(tls.to_text() for tls in member.members.values())):
            add_secret(secret)
        stack = AsyncExitStack()
        address = await self._serve_registry(stack, run_id, config, member, _port_of(remembered))
        self._open[run_id] = stack
        return GrpcRegistry(address, member, config.encrypted)

    async def close(self, run_id: str, *, forget: bool) -> None:
        stack = self._open.pop(run_id, None)
        if stack is not None:
            await stack.aclose()
        if forget:
            certificates.remove_identity(self._runs, run_id)

    async def _serve_registry(
        self,
        stack: AsyncExitStack,
        run_id: str,
        config: LauncherConfig,
        member: RunIdentity,
        port: int,
    ) -> str:
        """Serve, on another port if the remembered one is taken. Replicas that then cannot
        reach their launcher drain and are restarted."""
        local = config.backend == "local"
        host = "127.0.0.1" if local else "0.0.0.0"
        for wanted in dict.fromkeys((port or config.sky.registry_port, 0)):
            server = rpc.server(token=member.token)
            self._add(run_id, server)
            serving = rpc.serving(
                server,
                f"{host}:{wanted}",
                tls=member.tls_for(certificates.LAUNCHER) if config.encrypted else None,
                advertise=None if local else config.sky.advertise or _own_host(),
                grace_s=_GRACE_S,
            )
            try:
                at = await stack.enter_async_context(serving)
            except ConfigError:
                if not wanted:
                    raise
                _log.warning("the run's registry moves", run_id=run_id, taken=wanted)
            else:
                at.set_serving(True)
                return at.address
        raise AssertionError("port 0 is always free")


def _own_host() -> str:
    """Return the address at which machines reach this one. Raises ConfigError."""
    try:
        return route_address()
    except OSError as error:
        raise ConfigError(
            "cannot determine the address of this launcher: set launcher.sky.advertise"
        ) from error


def _port_of(address: str) -> int:
    _, _, port = address.rpartition(":")
    return int(port) if port.isdecimal() else 0
