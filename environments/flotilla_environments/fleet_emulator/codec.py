"""Fleet's request bodies, and the emulator's answers."""

import hashlib
import json
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field

from flotilla_environments.server.codec import ApiError
from flotilla_environments.server.instance_registry import ENVIRONMENT_VERSION, InstanceRequest
from flotilla_environments.task_generator import ALL_APPS, make_data_id

REGIONS = ("us-west-1", "us-east-1", "eu-west-2")
TEAM, PROFILE = "local", "local-profile"


def utc_timestamp() -> str:
    return datetime.now(UTC).isoformat()


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class MakeInstance(BaseModel):
    """POST /v1/env/instances. Times in seconds.

    Without a data key an environment with generated tasks opens the first training task's.
    """

    env_key: str
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    region: str | None = None
    env_variables: dict[str, Any] | None = None
    image_type: str | None = None
    created_from: str | None = None
    ttl_seconds: int = Field(default=900, gt=0, le=86_400)
    run_id: str | None = Field(default=None, max_length=256)
    heartbeat_interval: int | None = Field(default=None, ge=30, le=3_600)
    max_wait_seconds: int | None = Field(default=None, ge=0, le=3_600)

    def check_choices(self, versions: Collection[str]) -> None:
        """Check version, data key and region. Raises `ApiError` 400 with the texts by which Fleet's
        clients distinguish the cases."""
        version = self.env_version
        if version is not None and version not in versions:
            known = f"use one of {', '.join(versions)}"
            raise ApiError(400, f"Version '{version}' not found for '{self.env_key}': {known}")
        if self.data_key is None and self.env_key not in ALL_APPS:
            raise ApiError(400, f"data_key: '{self.env_key}' has no default data")
        if self.region is not None and self.region not in REGIONS:
            regions = list(REGIONS)
            raise ApiError(400, f"Region {self.region} not supported. Please use {regions}")

    def to_request(self, request_id: str | None) -> InstanceRequest:
        return InstanceRequest(
            env_key=self.env_key,
            data_key=self.data_key or make_data_id("train", 0),
            data_version=self.data_version or "v1",
            ttl=self.ttl_seconds,
            run_id=self.run_id,
            request_id=request_id,
            heartbeat_interval=self.heartbeat_interval,
            env_variables=self.env_variables,
            env_version=self.env_version or ENVIRONMENT_VERSION,
            region=self.region or REGIONS[0],
            profile_id=PROFILE,
        )


class WriteTask(BaseModel):
    """POST /v1/tasks, in both vocabularies of field names, which `normalize_task` unifies."""

    model_config = {"extra": "allow"}


class UpdateTask(BaseModel):
    """PUT /v1/tasks/{key}."""

    prompt: str | None = None
    verifier_code: str | None = None
    metadata: dict[str, Any] | None = None


class ExecuteVerifier(BaseModel):
    """POST /v1/verifiers/execute.

    `args` is base64 of a pickle, opened only where the verifier runs; `args_array` ends with
    {"env": instance id}; `bundle` is base64 of a zip with verifier.py. `timeout` in seconds.
    """

    key: str | None = None
    sha256: str | None = None
    bundle: str | None = None
    args: str | None = None
    args_array: list[Any] = Field(min_length=1)
    function_name: str = "verify"
    timeout: int = Field(default=60, ge=1, le=300)

    def instance_id(self) -> str:
        last = self.args_array[-1]
        found = last.get("env") if isinstance(last, dict) else None
        if not isinstance(found, str):
            raise ApiError(422, 'args_array: the last item must be {"env": instance id}')
        return found


class ExecuteFunction(BaseModel):
    """POST {runner}/execute_verifier_function."""

    function_code: str
    function_name: str
    text_solution: str | None = None


class Ignored(BaseModel):
    """Tables, and fields of any table or of one, that a diff leaves out."""

    tables: list[str] = []
    fields: list[str] = []
    table_fields: dict[str, list[str]] = {}


class StructuredDiff(BaseModel):
    """POST {runner}/diff/structured."""

    ignore_config: Ignored = Ignored()


class Ingest(BaseModel):
    """POST /v1/sessions/ingest (with messages) and /v1/traces/logs (with history, response)."""

    model_config = {"extra": "allow"}

    session_id: str | None = None
    messages: list[dict[str, Any]] | None = None
    history: list[Any] | None = None
    response: Any = None
    status: str | None = None


class TraceJob(BaseModel):
    """POST /v1/traces/jobs."""

    name: str | None = None


def task_body(task: dict[str, Any]) -> dict[str, Any]:
    """Fleet's TaskResponse of a task in the SDK's vocabulary."""
    code = task.get("verifier_func")
    identifier = task.get("verifier_id") or f"verifier-{task['key']}"
    created_at = task.get("created_at") or utc_timestamp()
    verifier = code and {
        "verifier_id": identifier,
        "key": task["key"],
        "version": 1,
        "sha256": hash_text(code),
        "code": code,
        "created_at": created_at,
    }
    return {
        "key": task["key"],
        "prompt": task["prompt"],
        "team_id": TEAM,
        "environment_id": task["env_id"],
        "created_at": created_at,
        "verifier_id": identifier if code else None,
        "verifier_func": code,
        "version": task.get("version"),
        "data_id": task.get("data_id"),
        "data_version": task.get("data_version"),
        "env_variables": task.get("env_variables") or {},
        "verifier": verifier,
        "metadata": task.get("metadata") or {"task_modality": task.get("task_modality")},
        "output_json_schema": task.get("output_json_schema"),
    }


def problems_body(problems: list[Any]) -> list[dict[str, Any]]:
    """Fleet's detail of a 422."""
    plain: list[dict[str, Any]] = json.loads(json.dumps(problems, default=str))
    return [{**problem, "loc": ["body", *problem["loc"]]} for problem in plain]
