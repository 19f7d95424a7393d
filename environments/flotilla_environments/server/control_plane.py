"""The control plane: the served environments, and the life of their instances."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flotilla_environments.server.codec import (
    ApiError,
    CreateInstance,
    environment_body,
    instance_body,
    parse_body,
)
from flotilla_environments.server.instance_lookup import InstanceLookup
from flotilla_environments.server.instance_registry import (
    ENVIRONMENT_VERSION,
    InstanceLimitError,
    InstanceRecord,
    Registry,
)

INSTANCES = "/v1/env/instances"


class ControlPlane:
    """Handlers of the control plane's routes, and the reaper of abandoned instances."""

    reap_seconds = 0.5

    def __init__(
        self,
        registry: Registry,
        lookup: InstanceLookup,
        env_keys: tuple[str, ...],
        speed: float = 1.0,
    ) -> None:
        """`speed` is the factor by which instances' clocks run; at 60 their minute is a second."""
        self.registry = registry
        self.env_keys = env_keys
        self._lookup = lookup
        self._speed = speed

    def build_routes(self) -> list[Route]:
        instance = f"{INSTANCES}/{{instance_id}}"
        return [
            Route("/health", self.get_health),
            Route("/v1/env/", self.list_environments),
            Route(INSTANCES, self.create_instance, methods=["POST"]),
            Route(INSTANCES, self.list_instances),
            Route(f"{INSTANCES}/batch", self.delete_batch, methods=["DELETE"]),
            Route(instance, self.get_instance),
            Route(instance, self.delete_instance, methods=["DELETE"]),
            Route(f"{instance}/heartbeat", self.record_heartbeat, methods=["POST"]),
        ]

    @asynccontextmanager
    async def run_reaper(self) -> AsyncGenerator[None]:
        """Stop instances in time, and all of them at the end."""
        reaper = asyncio.create_task(self._reap_expired())
        try:
            yield
        finally:
            reaper.cancel()
            with suppress(asyncio.CancelledError):
                await reaper
            for record in self.registry.live_records():
                self.registry.stop_instance(record, "shutdown")

    async def _reap_expired(self) -> None:
        while True:
            await asyncio.sleep(self.reap_seconds)
            self.registry.stop_expired(self.now())

    def now(self) -> float:
        """Return the seconds on the instances' clock."""
        return time.monotonic() * self._speed

    async def get_health(self, request: Request) -> Response:
        return JSONResponse({"status": "healthy", "instances": len(self.registry)})

    async def list_environments(self, request: Request) -> Response:
        return JSONResponse([environment_body(k, self._list_versions(k)) for k in self.env_keys])

    def _list_versions(self, env_key: str) -> tuple[str, ...]:
        return (ENVIRONMENT_VERSION,)

    async def create_instance(self, request: Request) -> Response:
        body = await parse_body(CreateInstance, request)
        self._check_environment(body.env_key)
        request_id = request.headers.get("x-request-id")
        self._check_first(request_id)
        try:
            record = self.registry.create_instance(body.to_request(request_id), self.now())
        except InstanceLimitError as error:
            raise ApiError(403, self._limit_detail()) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return self._instance_response(request, record)

    def _check_environment(self, env_key: str) -> None:
        if env_key not in self.env_keys:
            known = ", ".join(self.env_keys)
            raise ApiError(400, f"Environment '{env_key}' not found: use one of {known}")

    def _check_first(self, request_id: str | None) -> None:
        """Refuse a create that is a repetition, naming what the first one has created."""
        existing = self.registry.created_by(request_id)
        if existing is None:
            return
        message = f"Request '{request_id}' has already created an instance"
        detail = {"error": "duplicate_request_id", "message": message, "instance_id": existing}
        raise ApiError(409, detail)

    def _limit_detail(self) -> dict[str, Any]:
        running, limit = len(self.registry), self.registry.max_running
        return {
            "error_type": "instance_limit_exceeded",
            "message": f"{running} of {limit} instances run: close some, or serve with a higher "
            "--max-instances",
            "running_instances": running,
            "instance_limit": limit,
        }

    async def list_instances(self, request: Request) -> Response:
        base_url = _base_url(request)
        bodies = [instance_body(record, base_url) for record in self.registry.all_records()]
        for field in ("status", "region", "run_id", "profile_id"):
            wanted = self._get_filter(request, field)
            bodies = [body for body in bodies if wanted in (None, body[field])]
        return JSONResponse(bodies)

    async def get_instance(self, request: Request) -> Response:
        return self._instance_response(request, self._lookup.find_record(request))

    async def delete_instance(self, request: Request) -> Response:
        record = self._lookup.find_record(request)
        self.registry.stop_instance(record, "deleted")
        return self._instance_response(request, record)

    async def delete_batch(self, request: Request) -> Response:
        run_id, profile_id = (self._get_filter(request, name) for name in ("run_id", "profile_id"))
        if not run_id and not profile_id:
            raise ApiError(400, "name the run whose instances to delete: ?run_id=RUN")
        stopped = [
            record
            for record in self.registry.live_records()
            if run_id in (None, record.wanted.run_id)
            and profile_id in (None, record.wanted.profile_id)
        ]
        for record in stopped:
            self.registry.stop_instance(record, "deleted")
        return JSONResponse([instance_body(record, _base_url(request)) for record in stopped])

    async def record_heartbeat(self, request: Request) -> Response:
        record = self._lookup.find_record(request)
        if not record.is_running:
            raise ApiError(404, f"Instance '{record.instance_id}' is not running")
        record.heartbeat_at = self.now()
        interval = record.wanted.heartbeat_interval
        now = datetime.now(UTC)
        deadline = now.timestamp() + interval / self._speed if interval else None
        return JSONResponse(
            {
                "success": True,
                "instance_id": record.instance_id,
                "last_heartbeat": now.isoformat(),
                "deadline_timestamp": deadline,
                "interval_seconds": interval,
            }
        )

    def _get_filter(self, request: Request, name: str) -> str | None:
        return request.query_params.get(name)

    def _instance_response(self, request: Request, record: InstanceRecord) -> Response:
        return JSONResponse(instance_body(record, _base_url(request)))


def _base_url(request: Request) -> str:
    return str(request.base_url).rstrip("/")
