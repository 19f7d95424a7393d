"""The team's tasks, and the logs of attempts at them."""

import uuid
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flotilla_environments.fleet_emulator.codec import (
    Ingest,
    TraceJob,
    UpdateTask,
    WriteTask,
    task_body,
    utc_timestamp,
)
from flotilla_environments.server.codec import ApiError, parse_body
from flotilla_environments.tasks import TaskError, normalize_task

MAX_SESSIONS = 1_000


class TaskStore:
    """Tasks by key, in the SDK's vocabulary."""

    def __init__(self, tasks: Iterable[dict[str, Any]]) -> None:
        now = utc_timestamp()
        self._tasks = {task["key"]: {"created_at": now, **task} for task in tasks}

    def build_routes(self) -> list[Route]:
        one = "/v1/tasks/{key}"
        return [
            Route("/v1/tasks", self.list_tasks),
            Route("/v1/tasks", self.write_task, methods=["POST"]),
            Route(one, self.get_task),
            Route(one, self.update_task, methods=["PUT"]),
        ]

    def list_versions(self, env_key: str) -> list[str]:
        """List the versions that tasks of an environment name."""
        tasks = (task for task in self._tasks.values() if task["env_id"] == env_key)
        return [version for task in tasks if (version := task.get("version"))]

    def find_verifier(self, verifier_id: str) -> dict[str, Any] | None:
        """Find a verifier by its id, as Fleet's VerifierData."""
        bodies = (task_body(task) for task in self._tasks.values())
        return next(
            (body["verifier"] for body in bodies if body["verifier_id"] == verifier_id), None
        )

    async def list_tasks(self, request: Request) -> Response:
        query = request.query_params
        keys = query.getlist("task_keys")
        bodies = [
            task_body(task) for task in self._tasks.values() if not keys or task["key"] in keys
        ]
        fields = {"env_key": "environment_id", "data_id": "data_id", "data_version": "data_version"}
        for name, of in fields.items():
            if name in query:
                bodies = [body for body in bodies if body[of] == query[name]]
        return JSONResponse({"tasks": bodies, "total": len(bodies)})

    async def write_task(self, request: Request) -> Response:
        body = await parse_body(WriteTask, request)
        given = body.model_extra or {}
        try:
            # The SDK's raw request has a third name for the environment.
            task = normalize_task({"env_id": given.get("environment_id"), **given})
        except TaskError as error:
            raise ApiError(400, str(error)) from error
        task["created_at"] = task.get("created_at") or utc_timestamp()
        self._tasks[task["key"]] = task
        return JSONResponse(task_body(task))

    async def get_task(self, request: Request) -> Response:
        return JSONResponse(task_body(self._find_task(request)))

    async def update_task(self, request: Request) -> Response:
        task = self._find_task(request)
        body = await parse_body(UpdateTask, request)
        task["prompt"] = body.prompt or task["prompt"]
        task["verifier_func"] = body.verifier_code or task.get("verifier_func")
        task["metadata"] = body.metadata or task.get("metadata")
        return JSONResponse(task_body(task))

    def _find_task(self, request: Request) -> dict[str, Any]:
        key = request.path_params["key"]
        if key not in self._tasks:
            raise ApiError(404, f"Task '{key}' not found")
        return self._tasks[key]


@dataclass
class _Session:
    messages: list[Any] = field(default_factory=list[Any])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


class SessionStore:
    """Logged sessions, the latest `MAX_SESSIONS` of them."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._jobs = 0

    def build_routes(self) -> list[Route]:
        return [
            Route("/v1/sessions/ingest", self.ingest_session, methods=["POST"]),
            Route("/v1/traces/logs", self.ingest_session, methods=["POST"]),
            Route("/v1/traces/jobs", self.create_trace_job, methods=["POST"]),
            Route("/v1/sessions/{session_id}/transcript", self.get_transcript),
        ]

    async def ingest_session(self, request: Request) -> Response:
        body = await parse_body(Ingest, request)
        session_id = body.session_id or str(uuid.uuid4())
        new = session_id not in self._sessions
        session = self._sessions.setdefault(session_id, _Session())
        session.messages += body.messages or body.history or []
        if body.response is not None:
            session.messages.append(body.response)
        session.facts |= body.model_extra or {}
        session.facts["status"] = body.status or session.facts.get("status", "running")
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return JSONResponse(
            {
                "success": True,
                "session_id": session_id,
                "message_count": len(session.messages),
                "created_new_session": new,
            }
        )

    async def get_transcript(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["session_id"])
        if session is None:
            raise ApiError(404, "Session not found")
        messages = [_to_message(entry) for entry in session.messages]
        return JSONResponse({"transcript": messages, "facts": session.facts})

    async def create_trace_job(self, request: Request) -> Response:
        body = await parse_body(TraceJob, request)
        self._jobs += 1
        name = body.name or f"job-{self._jobs}"
        return JSONResponse({"job_id": str(uuid.uuid4()), "name": name, "status": "running"})


def _to_message(entry: Any) -> dict[str, Any]:
    if isinstance(entry, dict) and "role" in entry and "content" in entry:
        return entry
    return {"role": "assistant", "content": entry}
