"""The HTTP application: control plane, instance runner and tools."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from mcp.server.transport_security import RequestBodyLimitMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from environments.api import DATABASES, DatabaseName, Instance
from environments.scenario import APPS
from environments.server.auth import BearerToken
from environments.server.codec import (
    ApiError,
    CreateInstance,
    RunQuery,
    failed_query_body,
    instance_body,
    parse,
    rows_body,
)
from environments.server.registry import (
    ENVIRONMENT_VERSION,
    InstanceLimitError,
    Record,
    Registry,
)
from environments.server.tools import ToolEndpoint

MAX_BODY_BYTES = 2**20
REAP_SECONDS = 0.5


class EnvironmentServer:
    """Handlers of every route; one process, one event loop, tools run to completion in turn."""

    def __init__(self, registry: Registry, env_keys: tuple[str, ...]) -> None:
        self.registry = registry
        self.env_keys = env_keys
        self.tools = ToolEndpoint()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        reaper = asyncio.create_task(self._reap())
        try:
            async with self.tools.running():
                yield
        finally:
            reaper.cancel()
            with suppress(asyncio.CancelledError):
                await reaper
            for record in self.registry.running():
                self.registry.stop(record, "shutdown")

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_SECONDS)
            self.registry.stop_expired(time.monotonic())

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "healthy", "instances": len(self.registry)})

    async def environments(self, request: Request) -> Response:
        return JSONResponse([_environment(key) for key in self.env_keys])

    async def create(self, request: Request) -> Response:
        asked = await parse(CreateInstance, request)
        if asked.env_key not in self.env_keys:
            known = ", ".join(self.env_keys)
            raise ApiError(400, f"Environment '{asked.env_key}' not found: use one of {known}")
        request_id = request.headers.get("x-request-id")
        existing = self.registry.created_by(request_id)
        if existing is not None:
            message = f"Request '{request_id}' has already created an instance"
            detail = {"error": "duplicate_request_id", "message": message, "instance_id": existing}
            raise ApiError(409, detail)
        try:
            record = self.registry.create(asked.wanted(request_id), time.monotonic())
        except InstanceLimitError as error:
            raise ApiError(403, self._limit_detail()) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return self._record(request, record)

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
        status, run_id = (request.query_params.get(name) for name in ("status", "run_id"))
        bodies = [instance_body(record, _base(request)) for record in self.registry.records()]
        return JSONResponse(
            [
                body
                for body in bodies
                if status in (None, body["status"]) and run_id in (None, body["run_id"])
            ]
        )

    async def get_instance(self, request: Request) -> Response:
        return self._record(request, self._find(request))

    async def delete_instance(self, request: Request) -> Response:
        record = self._find(request)
        self.registry.stop(record, "deleted")
        return self._record(request, record)

    async def delete_batch(self, request: Request) -> Response:
        run_id = request.query_params.get("run_id")
        if not run_id:
            raise ApiError(400, "name the run whose instances to delete: ?run_id=RUN")
        stopped = [record for record in self.registry.running() if record.wanted.run_id == run_id]
        for record in stopped:
            self.registry.stop(record, "deleted")
        return JSONResponse([instance_body(record, _base(request)) for record in stopped])

    async def heartbeat(self, request: Request) -> Response:
        record = self._find(request)
        self._running(record)
        record.heartbeat_at = time.monotonic()
        interval = record.wanted.heartbeat_interval
        now = datetime.now(UTC)
        return JSONResponse(
            {
                "success": True,
                "instance_id": record.instance_id,
                "last_heartbeat": now.isoformat(),
                "deadline_timestamp": now.timestamp() + interval if interval else None,
                "interval_seconds": interval,
            }
        )

    async def instance_health(self, request: Request) -> Response:
        instance = self._running(self._find(request))
        timestamp = datetime.now(UTC).isoformat()
        return JSONResponse(
            {"status": "healthy", "timestamp": timestamp, "service": instance.env_key}
        )

    async def resources(self, request: Request) -> Response:
        self._running(self._find(request))
        modes = {"seed": "ro", "current": "rw"}
        return JSONResponse(
            [
                {"name": name, "type": "sqlite", "mode": mode, "label": name}
                for name, mode in modes.items()
            ]
        )

    async def query(self, request: Request) -> Response:
        instance, name = self._database(request)
        asked = await parse(RunQuery, request)
        if name == "seed" and not asked.read_only:
            raise ApiError(400, "the seed database is read-only: write to 'current'")
        try:
            rows = instance.query(name, asked.query, asked.args or (), read_only=asked.read_only)
        except sqlite3.Error as error:
            return JSONResponse(failed_query_body(error))
        return JSONResponse(rows_body(rows))

    async def describe(self, request: Request) -> Response:
        instance, name = self._database(request)
        tables = instance.query(
            name,
            "select name, sql from sqlite_master where type = 'table' and name not like 'sqlite_%'",
        ).rows
        described = [
            {"name": table, "sql": sql, "columns": _columns(instance, name, table)}
            for table, sql in tables
        ]
        body = {"success": True, "resource_name": name, "tables": described, "message": "ok"}
        return JSONResponse(body)

    async def reset(self, request: Request) -> Response:
        self._running(self._find(request)).reset()
        return JSONResponse({"success": True, "message": "Environment reset"})

    async def call_tools(self, scope: Scope, receive: Receive, send: Send) -> None:
        instance = self._running(self._find(Request(scope)))
        await self.tools.serve(instance, scope, receive, send)

    def _find(self, request: Request) -> Record:
        instance_id = request.path_params["instance_id"]
        record = self.registry.get(instance_id)
        if record is None:
            raise ApiError(404, f"Instance '{instance_id}' not found")
        return record

    def _running(self, record: Record) -> Instance:
        if record.instance is None:
            raise ApiError(
                404, f"Instance '{record.instance_id}' has stopped ({record.stop_reason})"
            )
        return record.instance

    def _database(self, request: Request) -> tuple[Instance, DatabaseName]:
        instance = self._running(self._find(request))
        name = request.path_params["name"]
        if name not in DATABASES:
            raise ApiError(404, f"Resource '{name}' not found: use one of {', '.join(DATABASES)}")
        return instance, name

    def _record(self, request: Request, record: Record) -> Response:
        return JSONResponse(instance_body(record, _base(request)))


class _Tools:
    """Wraps the method so that Starlette takes it for an ASGI application, not for a handler."""

    def __init__(self, server: EnvironmentServer) -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._server.call_tools(scope, receive, send)


def _environment(env_key: str) -> dict[str, Any]:
    return {
        "env_key": env_key,
        "name": env_key.capitalize(),
        "description": f"{len(APPS[env_key].tools)} tools",
        "default_version": ENVIRONMENT_VERSION,
        "versions": {ENVIRONMENT_VERSION: {}},
    }


def _columns(instance: Instance, name: DatabaseName, table: str) -> list[dict[str, Any]]:
    rows = instance.query(name, f"pragma table_info({table})").rows
    return [
        {
            "name": row[1],
            "type": row[2],
            "notnull": bool(row[3]),
            "default_value": row[4],
            "primary_key": row[5] > 0,
        }
        for row in rows
    ]


def _base(request: Request) -> str:
    return str(request.base_url).rstrip("/")


async def _answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse({"detail": error.detail}, error.status)


def build_app(
    registry: Registry, env_keys: tuple[str, ...], *, hosts: list[str], token: str | None
) -> ASGIApp:
    """The application; `hosts` are the Host headers it answers to, against DNS rebinding."""
    server = EnvironmentServer(registry, env_keys)
    instances, runner = "/v1/env/instances", "/{instance_id}/api/v1/env"
    routes = [
        Route("/{instance_id}/mcp", _Tools(server), methods=["POST"]),
        Route("/health", server.health),
        Route("/v1/env/", server.environments),
        Route(instances, server.create, methods=["POST"]),
        Route(instances, server.list_instances),
        Route(f"{instances}/batch", server.delete_batch, methods=["DELETE"]),
        Route(f"{instances}/{{instance_id}}", server.get_instance),
        Route(f"{instances}/{{instance_id}}", server.delete_instance, methods=["DELETE"]),
        Route(f"{instances}/{{instance_id}}/heartbeat", server.heartbeat, methods=["POST"]),
        Route(f"{runner}/health", server.instance_health),
        Route(f"{runner}/resources", server.resources),
        Route(f"{runner}/resources/sqlite/{{name}}/query", server.query, methods=["POST"]),
        Route(f"{runner}/resources/sqlite/{{name}}/describe", server.describe),
        Route(f"{runner}/reset", server.reset, methods=["POST"]),
    ]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    if token:
        middleware.append(Middleware(BearerToken, token=token))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ApiError: _answer},
        lifespan=server.lifespan,
    )
    return RequestBodyLimitMiddleware(app, MAX_BODY_BYTES)
