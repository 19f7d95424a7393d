"""From a request's path to the instance it is about."""

from starlette.requests import Request

from environments.api import Instance
from environments.server.codec import ApiError
from environments.server.registry import Record, Registry


class Lookup:
    """Finds instances by the path parameter `instance_id`."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def record(self, request: Request) -> Record:
        """Raises `ApiError` 404 for an instance that is not remembered."""
        instance_id = request.path_params["instance_id"]
        record = self.registry.get(instance_id)
        if record is None:
            raise ApiError(404, f"Instance '{instance_id}' not found")
        return record

    def running(self, request: Request) -> Instance:
        """Raises `ApiError` 404 also for an instance that has stopped."""
        record = self.record(request)
        if record.instance is None:
            raise ApiError(
                404, f"Instance '{record.instance_id}' has stopped ({record.stop_reason})"
            )
        return record.instance
