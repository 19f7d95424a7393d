"""Lookup of the instance in a request's path."""

from starlette.requests import Request

from flotilla_environments.api import Instance
from flotilla_environments.server.codec import ApiError
from flotilla_environments.server.instance_registry import InstanceRecord, Registry


class InstanceLookup:
    """Finds instances by the path parameter `instance_id`."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def find_record(self, request: Request) -> InstanceRecord:
        """Find the record. Raises `ApiError` 404 for an instance that is not remembered."""
        instance_id = request.path_params["instance_id"]
        record = self.registry.find_record(instance_id)
        if record is None:
            raise ApiError(404, f"Instance '{instance_id}' not found")
        return record

    def find_running(self, request: Request) -> Instance:
        """Find the running instance. Raises `ApiError` 404 also for one that has stopped."""
        record = self.find_record(request)
        if record.instance is None:
            raise ApiError(
                404, f"Instance '{record.instance_id}' has stopped ({record.stop_reason})"
            )
        return record.instance
