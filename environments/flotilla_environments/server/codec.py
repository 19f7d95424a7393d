"""Conversion between Fleet's JSON bodies and our own types."""

import json
import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator
from starlette.requests import Request

from flotilla_environments.api import Rows, tools_of
from flotilla_environments.server.instance_registry import (
    ENVIRONMENT_VERSION,
    InstanceRecord,
    InstanceRequest,
)

M = TypeVar("M", bound=BaseModel)


class ApiError(Exception):
    """An error answered as {"detail": detail} with the status."""

    def __init__(self, status: int, detail: str | dict[str, Any] | list[dict[str, Any]]) -> None:
        super().__init__(str(detail))
        self.status = status
        self.detail = detail


class InvalidBodyError(ApiError):
    """A body with wrong fields, every one named in the detail; `problems` has them one by one."""

    def __init__(self, error: ValidationError) -> None:
        self.problems = error.errors(include_url=False, include_context=False, include_input=False)
        wrong = [
            f"{'.'.join(str(part) for part in problem['loc']) or 'body'}: {problem['msg']}"
            for problem in self.problems
        ]
        super().__init__(422, "; ".join(wrong))


class CreateInstance(BaseModel):
    """POST /v1/env/instances; what else Fleet's clients send is ignored. Times in seconds."""

    env_key: str
    data_key: str
    data_version: str = "v1"
    env_version: str | None = None
    env_variables: dict[str, Any] | None = None
    ttl_seconds: float = Field(default=900.0, gt=0, le=86_400)
    heartbeat_interval: float | None = Field(default=None, ge=1, le=3_600)
    run_id: str | None = Field(default=None, max_length=256)

    @field_validator("env_version")
    @classmethod
    def _check_version(cls, value: str | None) -> str | None:
        if value not in (None, ENVIRONMENT_VERSION, ENVIRONMENT_VERSION.lstrip("v")):
            raise ValueError(f"version {value!r} not found: use {ENVIRONMENT_VERSION!r}")
        return value

    def to_request(self, request_id: str | None) -> InstanceRequest:
        return InstanceRequest(
            env_key=self.env_key,
            data_key=self.data_key,
            data_version=self.data_version,
            ttl=self.ttl_seconds,
            run_id=self.run_id,
            request_id=request_id,
            heartbeat_interval=self.heartbeat_interval,
            env_variables=self.env_variables,
        )


class RunQuery(BaseModel):
    """POST .../query."""

    query: str
    args: list[Any] | None = None
    read_only: bool = True


async def parse_body(model: type[M], request: Request) -> M:
    """Parse a JSON body. Raises `ApiError` 400 for no JSON, 422 naming every wrong field."""
    try:
        content = json.loads(await request.body())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise InvalidBodyError(error) from error


def environment_body(env_key: str, versions: Iterable[str]) -> dict[str, Any]:
    """Fleet's Environment."""
    return {
        "env_key": env_key,
        "name": env_key.capitalize(),
        "description": f"{len(tools_of(env_key))} tools",
        "default_version": ENVIRONMENT_VERSION,
        "versions": {version: env_key for version in versions},
    }


def instance_body(record: InstanceRecord, base_url: str) -> dict[str, Any]:
    """Fleet's InstanceResponse; `base_url` is the server's own, without a slash at the end."""
    wanted = record.wanted
    return {
        "instance_id": record.instance_id,
        "env_key": wanted.env_key,
        "version": wanted.env_version,
        "status": record.status,
        "subdomain": record.instance_id,
        "created_at": record.created_at.isoformat(),
        "updated_at": (record.terminated_at or record.created_at).isoformat(),
        "terminated_at": _to_iso(record.terminated_at),
        "termination_reason": record.stop_reason,
        "team_id": "local",
        "region": wanted.region,
        "env_variables": wanted.env_variables,
        "data_key": wanted.data_key,
        "data_version": wanted.data_version,
        "urls": _instance_urls(f"{base_url}/{record.instance_id}/"),
        "health": record.is_running,
        "run_id": wanted.run_id,
        "profile_id": wanted.profile_id,
        "heartbeat_interval": wanted.heartbeat_interval,
    }


def _instance_urls(root: str) -> dict[str, Any]:
    """Return every address that Fleet's clients insist on, served or not."""
    manager = f"{root}api/v1/env"
    routes = (
        "reset",
        "docs",
        "diff",
        "snapshot",
        "execute_verifier_function",
        "execute_verifier_function_with_upload",
    )
    return {
        "root": root,
        "app": [root],
        "health": f"{manager}/health",
        "manager": {
            "api": manager,
            **{name: f"{manager}/{name}" for name in routes},
        },
    }


def _to_iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def rows_body(rows: Rows) -> dict[str, Any]:
    """Fleet's QueryResponse of a statement that ran."""
    reads = bool(rows.columns)
    return {
        "success": True,
        "columns": rows.columns if reads else None,
        "rows": [[_to_json_value(value) for value in row] for row in rows.rows] if reads else None,
        "rows_affected": None if reads else rows.rows_affected,
        "last_insert_id": None if reads else rows.last_insert_id,
        "error": None,
        "message": "ok",
    }


def failed_query_body(error: Exception) -> dict[str, Any]:
    """Fleet's QueryResponse of a statement that SQLite refused."""
    return {
        "success": False,
        "columns": None,
        "rows": None,
        "rows_affected": None,
        "last_insert_id": None,
        "error": str(error),
        "message": f"Query failed: {error}",
    }


def _to_json_value(value: Any) -> Any:
    """Convert bytes and infinities, of which JSON has neither."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
