"""The instance runner: what Fleet's clients find below {root}api/v1/env."""

import sqlite3
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from environments.api import DATABASES, DatabaseName, Instance
from environments.server.codec import ApiError, RunQuery, failed_query_body, parse, rows_body
from environments.server.lookup import Lookup

PREFIX = "/{instance_id}/api/v1/env"


class Runner:
    """Handlers of an instance's own routes."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def routes(self) -> list[Route]:
        sqlite = f"{PREFIX}/resources/sqlite/{{name}}"
        return [
            Route(f"{PREFIX}/health", self.health),
            Route(f"{PREFIX}/resources", self.resources),
            Route(f"{sqlite}/query", self.query, methods=["POST"]),
            Route(f"{sqlite}/describe", self.describe),
            Route(f"{PREFIX}/reset", self.reset, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        instance = self._lookup.running(request)
        timestamp = datetime.now(UTC).isoformat()
        return JSONResponse(
            {"status": "healthy", "timestamp": timestamp, "service": instance.env_key}
        )

    async def resources(self, request: Request) -> Response:
        self._lookup.running(request)
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
        self._lookup.running(request).reset()
        return JSONResponse({"success": True, "message": "Environment reset"})

    def _database(self, request: Request) -> tuple[Instance, DatabaseName]:
        instance = self._lookup.running(request)
        name = request.path_params["name"]
        if name not in DATABASES:
            raise ApiError(404, f"Resource '{name}' not found: use one of {', '.join(DATABASES)}")
        return instance, name


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
