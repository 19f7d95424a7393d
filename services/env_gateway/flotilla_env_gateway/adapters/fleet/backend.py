"""Fleet's instances as environments: created, kept alive, called, graded and deleted."""

from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_env_gateway.adapters.fleet.connection import FleetConnection
from flotilla_env_gateway.adapters.fleet.instance import FleetInstance
from flotilla_env_gateway.adapters.fleet.screen import image_type, page_url
from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.server_address import connect_server
from flotilla_env_gateway.config.backends import FleetConfig
from flotilla_env_gateway.ports import Backend, HeartbeatLateness, Orphan, ProvisionRequest


def build_fleet_backend(config: FleetConfig, *, max_calls: int) -> "FleetBackend":
    """Build Fleet's backend. Raises ConfigError when the API key is not in the environment."""
    address, headers = connect_server(config, where="env_gateway.backends.fleet")
    # Creations take minutes, and each holds a connection: neither they nor calls may keep
    # heartbeats waiting for one. The gateway's limits bound their number.
    http = open_http_session(max_connections=0, headers={})
    return FleetBackend(FleetConnection(config, address, http, headers))


class FleetBackend(Backend):
    """Fleet as a backend."""

    isolates_instances = True

    def __init__(self, connection: FleetConnection) -> None:
        self.connection = connection

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> FleetInstance:
        until = loop_time() + timeout_s
        await self.connection.address.wait_for_root(timeout_s)
        generation = self.connection.address.generation
        body = await self.connection.api.create_instance(
            request, image_type=image_type(request.task.modality), timeout_s=seconds_left(until)
        )
        lease = None
        if request.task.modality == "browser_use":
            lease = await self.connection.browsers.lease_browser(
                request.episode_id,
                page_url(body),
                ttl_s=request.ttl_s,
                timeout_s=seconds_left(until),
            )
        instance = FleetInstance(self.connection, body, request, lease, generation)
        self.connection.heartbeats.watch_instance(instance.instance_id, instance)
        return instance

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        if orphan.instance_id is not None:
            await self.connection.delete_instance(orphan.instance_id, timeout_s)
        else:
            await self.connection.api.delete_run_instances(orphan.episode_id, timeout_s=timeout_s)

    @property
    def lateness(self) -> HeartbeatLateness:
        heartbeats = self.connection.heartbeats
        return HeartbeatLateness(heartbeats.late_count, len(heartbeats), heartbeats.last_failure)

    async def close(self) -> None:
        await self.connection.close()
