"""Lookup of a request's running instance; without one it answers like a reverse proxy."""

from starlette.requests import Request

from flotilla_environments.api import Instance
from flotilla_environments.fleet_emulator.faults import BAD_GATEWAY
from flotilla_environments.server.instance_lookup import InstanceLookup


class UpstreamError(Exception):
    """An error answered in HTML, like a reverse proxy that cannot reach an instance."""

    def __init__(self, status: int, page: str) -> None:
        super().__init__(page)
        self.status = status
        self.page = page


class FleetLookup(InstanceLookup):
    def find_running(self, request: Request) -> Instance:
        """Find the running instance. Raises `UpstreamError` 502 when no such instance runs."""
        record = self.registry.find_record(request.path_params["instance_id"])
        if record is None or record.instance is None:
            raise UpstreamError(502, BAD_GATEWAY)
        return record.instance
