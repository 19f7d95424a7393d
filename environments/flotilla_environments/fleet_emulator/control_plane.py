"""Fleet's control plane: quotas, regions and pending instances beside what every server has."""

import asyncio
from collections import defaultdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flotilla_environments.api import Instance, open_instance
from flotilla_environments.fleet_emulator.codec import PROFILE, REGIONS, TEAM, MakeInstance
from flotilla_environments.fleet_emulator.faults import FaultPlan
from flotilla_environments.fleet_emulator.request_counters import Counters
from flotilla_environments.fleet_emulator.task_catalogue import TaskStore
from flotilla_environments.server.codec import ApiError, environment_body, parse_body
from flotilla_environments.server.control_plane import ControlPlane
from flotilla_environments.server.instance_lookup import InstanceLookup
from flotilla_environments.server.instance_registry import (
    ENVIRONMENT_VERSION,
    InstanceRecord,
    InstanceRequest,
    Registry,
)


class FleetControlPlane(ControlPlane):
    reap_seconds = 0.1

    def __init__(
        self,
        registry: Registry,
        lookup: InstanceLookup,
        env_keys: tuple[str, ...],
        speed: float,
        plan: FaultPlan,
        counters: Counters,
        tasks: TaskStore,
    ) -> None:
        super().__init__(registry, lookup, env_keys, speed)
        self._tasks = tasks
        self._plan = plan
        self._counters = counters

    def build_routes(self) -> list[Route]:
        return [
            Route("/v1/regions", self.list_regions),
            Route("/v1/account", self.get_account),
            Route("/v1/env/runs", self.list_runs),
            Route("/v1/runner-auth/token", self.get_runner_token),
            *super().build_routes(),
            Route("/v1/env/{env_key}", self.get_environment),
        ]

    async def get_environment(self, request: Request) -> Response:
        env_key = request.path_params["env_key"]
        self._check_environment(env_key)
        return JSONResponse(environment_body(env_key, self._list_versions(env_key)))

    async def list_regions(self, request: Request) -> Response:
        return JSONResponse(list(REGIONS))

    async def get_account(self, request: Request) -> Response:
        return JSONResponse(
            {
                "team_id": TEAM,
                "team_name": "Local team",
                "instance_limit": self._instance_limit(),
                "instance_count": len(self.registry),
                "profile_id": PROFILE,
                "profile_name": "Local profile",
            }
        )

    async def get_runner_token(self, request: Request) -> Response:
        token = self._plan.runner_token
        if token is None:
            raise ApiError(404, "Not Found")
        return JSONResponse({"token": token})

    async def list_runs(self, request: Request) -> Response:
        grouped: dict[str, list[InstanceRecord]] = defaultdict(list)
        for record in self.registry.all_records():
            if record.wanted.run_id:
                grouped[record.wanted.run_id].append(record)
        wanted = request.query_params.get("active", "active")
        bodies = [_run_body(run_id, records) for run_id, records in grouped.items()]
        if wanted != "all":
            bodies = [
                body for body in bodies if bool(body["running_count"]) == (wanted == "active")
            ]
        return JSONResponse(bodies)

    async def create_instance(self, request: Request) -> Response:
        body = await parse_body(MakeInstance, request)
        request_id = request.headers.get("x-request-id")
        self._check_first(request_id)
        self._check_environment(body.env_key)
        body.check_choices(self._list_versions(body.env_key))
        wanted = body.to_request(request_id)
        try:
            instance = open_instance(wanted.env_key, wanted.data_key, wanted.data_version)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        record = self._reserve_place(wanted)
        with self._counters.creates.track_one():
            await self._start_instance(record, instance)
        return self._instance_response(request, record)

    def _list_versions(self, env_key: str) -> tuple[str, ...]:
        """List versions: that of the app, and others that tasks of a file were made for."""
        return tuple(dict.fromkeys((ENVIRONMENT_VERSION, *self._tasks.list_versions(env_key))))

    def _reserve_place(self, wanted: InstanceRequest) -> InstanceRecord:
        most = self._plan.settings.in_flight_creates
        if most is not None and self._counters.creates.now >= most:
            raise ApiError(429, "Too many in-flight instance creations for this team")
        if len(self.registry) >= self._instance_limit():
            raise ApiError(403, self._limit_detail())
        return self.registry.reserve_place(wanted, self.now())

    async def _start_instance(self, record: InstanceRecord, instance: Instance) -> None:
        delay = self._plan.settings.create_delay
        if delay:
            await asyncio.sleep(delay)
        self.registry.start_instance(record, instance, self.now())

    def _instance_limit(self) -> int:
        limit = self._plan.settings.instance_limit
        most = self.registry.max_running
        return most if limit is None else min(limit, most)

    def _limit_detail(self) -> dict[str, Any]:
        running, limit = len(self.registry), self._instance_limit()
        return {
            "error_type": "instance_limit_exceeded",
            "message": f"You have {running} running instances out of a maximum of {limit}. "
            "Please close some instances, or serve with a higher --instance-limit.",
            "running_instances": running,
            "instance_limit": limit,
        }

    def _get_filter(self, request: Request, name: str) -> str | None:
        value = super()._get_filter(request, name)
        return PROFILE if (name, value) == ("profile_id", "self") else value


def _run_body(run_id: str, records: list[InstanceRecord]) -> dict[str, Any]:
    created = sorted(record.created_at for record in records)
    return {
        "run_id": run_id,
        "running_count": sum(record.terminated_at is None for record in records),
        "total_count": len(records),
        "first_created_at": created[0].isoformat(),
        "last_created_at": created[-1].isoformat(),
        "profile_id": PROFILE,
    }
