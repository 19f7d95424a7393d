"""Fleet's control plane: quotas, regions and pending instances beside what every server has."""

import asyncio
from collections import defaultdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from environments.api import Instance, open_instance
from environments.fleet_emulator.codec import PROFILE, REGIONS, TEAM, MakeInstance
from environments.fleet_emulator.counters import Counters
from environments.fleet_emulator.faults import Plan
from environments.fleet_emulator.tasks import TaskStore
from environments.server.codec import ApiError, parse
from environments.server.control import Control
from environments.server.lookup import Lookup
from environments.server.registry import ENVIRONMENT_VERSION, Record, Registry, Wanted


class FleetControl(Control):
    reap_seconds = 0.1

    def __init__(
        self,
        registry: Registry,
        lookup: Lookup,
        env_keys: tuple[str, ...],
        speed: float,
        plan: Plan,
        counters: Counters,
        tasks: TaskStore,
    ) -> None:
        super().__init__(registry, lookup, env_keys, speed)
        self._tasks = tasks
        self._plan = plan
        self._counters = counters

    def routes(self) -> list[Route]:
        return [
            Route("/v1/regions", self.regions),
            Route("/v1/account", self.account),
            Route("/v1/env/runs", self.runs),
            Route("/v1/runner-auth/token", self.runner_token),
            *super().routes(),
            Route("/v1/env/{env_key}", self.environment),
        ]

    async def environment(self, request: Request) -> Response:
        env_key = request.path_params["env_key"]
        self._check_environment(env_key)
        return JSONResponse(self._environment(env_key))

    async def regions(self, request: Request) -> Response:
        return JSONResponse(list(REGIONS))

    async def account(self, request: Request) -> Response:
        return JSONResponse(
            {
                "team_id": TEAM,
                "team_name": "Local team",
                "instance_limit": self._limit(),
                "instance_count": len(self.registry),
                "profile_id": PROFILE,
                "profile_name": "Local profile",
            }
        )

    async def runner_token(self, request: Request) -> Response:
        token = self._plan.runner_token
        if token is None:
            raise ApiError(404, "Not Found")
        return JSONResponse({"token": token})

    async def runs(self, request: Request) -> Response:
        grouped: dict[str, list[Record]] = defaultdict(list)
        for record in self.registry.records():
            if record.wanted.run_id:
                grouped[record.wanted.run_id].append(record)
        wanted = request.query_params.get("active", "active")
        bodies = [_run_body(run_id, records) for run_id, records in grouped.items()]
        if wanted != "all":
            bodies = [
                body for body in bodies if bool(body["running_count"]) == (wanted == "active")
            ]
        return JSONResponse(bodies)

    async def create(self, request: Request) -> Response:
        asked = await parse(MakeInstance, request)
        request_id = request.headers.get("x-request-id")
        self._check_first(request_id)
        self._check_environment(asked.env_key)
        asked.check(self._versions(asked.env_key))
        wanted = asked.wanted(request_id)
        try:
            instance = open_instance(wanted.env_key, wanted.data_key, wanted.data_version)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        record = self._reserve(wanted)
        with self._counters.creates.one():
            await self._start(record, instance)
        return self._answer(request, record)

    def _versions(self, env_key: str) -> tuple[str, ...]:
        """The apps have one version; tasks of a file may have been made for others."""
        return tuple(dict.fromkeys((ENVIRONMENT_VERSION, *self._tasks.versions(env_key))))

    def _reserve(self, wanted: Wanted) -> Record:
        most = self._plan.settings.in_flight_creates
        if most is not None and self._counters.creates.now >= most:
            raise ApiError(429, "Too many in-flight instance creations for this team")
        if len(self.registry) >= self._limit():
            raise ApiError(403, self._limit_detail())
        return self.registry.reserve(wanted, self.now())

    async def _start(self, record: Record, instance: Instance) -> None:
        delay = self._plan.settings.create_delay
        if delay:
            await asyncio.sleep(delay)
        self.registry.start(record, instance, self.now())

    def _limit(self) -> int:
        limit = self._plan.settings.instance_limit
        most = self.registry.max_running
        return most if limit is None else min(limit, most)

    def _limit_detail(self) -> dict[str, Any]:
        running, limit = len(self.registry), self._limit()
        return {
            "error_type": "instance_limit_exceeded",
            "message": f"You have {running} running instances out of a maximum of {limit}. "
            "Please close some instances, or serve with a higher --instance-limit.",
            "running_instances": running,
            "instance_limit": limit,
        }

    def _filter(self, request: Request, name: str) -> str | None:
        value = super()._filter(request, name)
        return PROFILE if (name, value) == ("profile_id", "self") else value


def _run_body(run_id: str, records: list[Record]) -> dict[str, Any]:
    created = sorted(record.created_at for record in records)
    return {
        "run_id": run_id,
        "running_count": sum(record.terminated_at is None for record in records),
        "total_count": len(records),
        "first_created_at": created[0].isoformat(),
        "last_created_at": created[-1].isoformat(),
        "profile_id": PROFILE,
    }
