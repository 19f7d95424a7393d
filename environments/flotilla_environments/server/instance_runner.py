"""The instance runner: Fleet's routes below {root}api/v1/env."""

import sqlite3
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flotilla_environments.api import DATABASES, DatabaseName, Instance
from flotilla_environments.server.codec import (
    ApiError,
    RunQuery,
    failed_query_body,
    parse_body,
    rows_body,
)
from flotilla_environments.server.instance_lookup import InstanceLookup

PREFIX = "/{instance_id}/api/v1/env"


class Runner:
    """Handlers of an instance's own routes."""

    def __init__(self, lookup: InstanceLookup) -> None:
        self._lookup = lookup

    def build_routes(self) -> list[Route]:
        sqlite = f"{PREFIX}/resources/sqlite/{{name}}"
        return [
            Route(f"{PREFIX}/health", self.get_health),
            Route(f"{PREFIX}/resources", self.list_resources),
            Route(f"{sqlite}/query", self.query_database, methods=["POST"]),
            Route(f"{sqlite}/describe", self.describe_database),
            Route(f"{PREFIX}/reset", self.reset_instance, methods=["POST"]),
        ]

    async def get_health(self, request: Request) -> Response:
        instance = self._lookup.find_running(request)
        timestamp = datetime.now(UTC).isoformat()
        return JSONResponse(
            {"status": "healthy", "timestamp": timestamp, "service": instance.env_key}
        )

    async def list_resources(self, request: Request) -> Response:
        self._lookup.find_running(request)
        modes = {"seed": "ro", "current": "rw"}
        return JSONResponse(
            [
                {"name": name, "type": "sqlite", "mode": mode, "label": name}
                for name, mode in modes.items()
            ]
        )

    async def query_database(self, request: Request) -> Response:
        instance, name = self._find_database(request)
        body = await parse_body(RunQuery, request)
        if name == "seed" and not body.read_only:
            raise ApiError(400, "the seed database is read-only: write to 'current'")
        try:
            rows = instance.query(name, body.query, body.args or (), read_only=body.read_only)
        except sqlite3.Error as error:
            return JSONResponse(failed_query_body(error))
        return JSONResponse(rows_body(rows))

    async def describe_database(self, request: Request) -> Response:
        instance, name = self._find_database(request)
        tables = instance.query(
            name,
            "select name, sql from sqlite_master where type = 'table' and name not like 'sqlite_%'",
        ).rows
        described = [
            {"name": table, "sql": sql, "columns": _describe_columns(instance, name, table)}
            for table, sql in tables
        ]
        body = {"success": True, "resource_name": name, "tables": described, "message": "ok"}
        return JSONResponse(body)

    async def reset_instance(self, request: Request) -> Response:
        self._lookup.find_running(request).reset()
        return JSONResponse({"success": True, "message": "Environment reset"})

    def _find_database(self, request: Request) -> tuple[Instance, DatabaseName]:
        instance = self._lookup.find_running(request)
        name = request.path_params["name"]
        if name not in DATABASES:
            raise ApiError(404, f"Resource '{name}' not found: use one of {', '.join(DATABASES)}")
        return instance, name


def _describe_columns(instance: Instance, name: DatabaseName, table: str) -> list[dict[str, Any]]:
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
