"""The emulator's own routes: faults, counters, actions at a screen, and ending an instance."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flotilla_environments.fleet_emulator.fault_injection import ADMIN
from flotilla_environments.fleet_emulator.faults import FaultPlan, Faults, Strict
from flotilla_environments.fleet_emulator.mcp import Desks
from flotilla_environments.fleet_emulator.request_counters import Counters
from flotilla_environments.server.codec import ApiError, parse_body
from flotilla_environments.server.instance_registry import Registry


class Kill(Strict):
    """POST /_emulator/kill: the instance stops as if its machine had gone."""

    instance_id: str


class Admin:
    def __init__(
        self, registry: Registry, plan: FaultPlan, counters: Counters, desks: Desks
    ) -> None:
        self._registry = registry
        self._desks = desks
        self._plan = plan
        self._counters = counters

    def build_routes(self) -> list[Route]:
        return [
            Route(f"{ADMIN}/faults", self.get_faults),
            Route(f"{ADMIN}/faults", self.set_faults, methods=["POST"]),
            Route(f"{ADMIN}/faults", self.clear_faults, methods=["DELETE"]),
            Route(f"{ADMIN}/counters", self.get_counters),
            Route(f"{ADMIN}/counters", self.clear_counters, methods=["DELETE"]),
            Route(f"{ADMIN}/actions/{{instance_id}}", self.get_actions),
            Route(f"{ADMIN}/kill", self.kill_instance, methods=["POST"]),
        ]

    async def get_faults(self, request: Request) -> Response:
        return self._answer_faults()

    async def set_faults(self, request: Request) -> Response:
        """Replace all faults that were set before."""
        self._plan.set_faults(await parse_body(Faults, request))
        return self._answer_faults()

    async def clear_faults(self, request: Request) -> Response:
        self._plan.set_faults(Faults())
        return self._answer_faults()

    async def get_counters(self, request: Request) -> Response:
        return self._answer_counters()

    async def clear_counters(self, request: Request) -> Response:
        self._counters.clear()
        return self._answer_counters()

    async def get_actions(self, request: Request) -> Response:
        """Report the newest actions of `computer` at an instance's screen."""
        return JSONResponse(
            {"actions": self._desks.list_actions(request.path_params["instance_id"])}
        )

    async def kill_instance(self, request: Request) -> Response:
        body = await parse_body(Kill, request)
        if self._registry.find_record(body.instance_id) is None:
            raise ApiError(404, f"Instance '{body.instance_id}' not found")
        self.stop_instance(body.instance_id)
        return JSONResponse({"success": True})

    def stop_instance(self, instance_id: str) -> None:
        record = self._registry.find_record(instance_id)
        if record is not None:
            self._registry.stop_instance(record, "killed")

    def _answer_faults(self) -> Response:
        settings = self._plan.settings.model_dump(mode="json", exclude_defaults=True)
        return JSONResponse({"faults": settings, "left": self._plan.count_remaining()})

    def _answer_counters(self) -> Response:
        instances = {
            "created": self._registry.created,
            "live": [record.instance_id for record in self._registry.live_records()],
            "stopped": dict(sorted(self._registry.stopped.items())),
        }
        return JSONResponse({**self._counters.to_body(), "instances": instances})
