"""Connection that all instances at Fleet share: control plane, heartbeats, browsers, caches."""

from collections.abc import Mapping, Sequence
from functools import partial

import aiohttp

from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_env_gateway.adapters.fleet import wire as fleet_wire
from flotilla_env_gateway.adapters.fleet.api import FleetApi
from flotilla_env_gateway.adapters.fleet.browser import BrowserClient, split_id
from flotilla_env_gateway.adapters.fleet.heartbeats import Heartbeats
from flotilla_env_gateway.adapters.fleet.tools import FleetTools, RouteCache
from flotilla_env_gateway.adapters.fleet.verifier import FleetVerifier
from flotilla_env_gateway.adapters.mcp.http_transport import HttpTransport
from flotilla_env_gateway.adapters.mcp.read_only import mark_read_only
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.adapters.supervised_server import ServerAddress
from flotilla_env_gateway.config.backends import FleetConfig
from flotilla_env_gateway.ports import ProvisionRequest


class FleetConnection:
    """Access to Fleet for a backend and its instances. `address` is the current one of the control
    plane; `headers` carry the API key."""

    def __init__(
        self,
        config: FleetConfig,
        address: ServerAddress,
        http: aiohttp.ClientSession,
        headers: Mapping[str, str],
    ) -> None:
        self.address = address
        self.api = FleetApi(config, address, http, headers)
        self.verifier = None
        if config.verify == "remote":
            self.verifier = FleetVerifier(self.api, config.region)
        self.snapshots = fleet_wire.SnapshotCache()
        self.heartbeats = Heartbeats(ttl_s=config.heartbeat_interval_s)
        self.browsers = BrowserClient(self.api, config)
        self._routes: RouteCache = {}
        self._mark_tool = partial(mark_read_only, config=config)

    async def delete_instance(self, joined: str, timeout_s: float) -> None:
        """Delete an instance and its leased browser."""
        until = loop_time() + timeout_s
        instance_id, *leases = split_id(joined)
        await self.api.delete_instance(instance_id, timeout_s=timeout_s)
        for lease_id in leases:
            await self.browsers.release_browser(lease_id, timeout_s=seconds_left(until))

    async def find_end_reason(self, joined: str, timeout_s: float) -> str | None:
        """Return why an instance or its browser is gone; None while both run. Raises BackendError
        if that is unknown."""
        until = loop_time() + timeout_s
        instance_id, *leases = split_id(joined)
        why = await self.api.find_end_reason(instance_id, timeout_s)
        for lease_id in leases:
            why = why or await self.browsers.find_end_reason(lease_id, seconds_left(until))
        return why

    def make_tools(
        self, urls: Sequence[str], env: tuple[str, str], request: ProvisionRequest
    ) -> FleetTools:
        api = self.api
        # The state is the instance's, not a session's.
        sessions = {
            url: McpSession(
                partial(HttpTransport, api.http, url, headers=api.headers, limits=api.limits),
                stateless=True,
            )
            for url in urls
        }
        key = (*env, request.task.modality)
        return FleetTools(sessions, key, self._routes, self._mark_tool)

    async def close(self) -> None:
        await self.heartbeats.close()
        await self.api.http.close()
        await self.address.close()
