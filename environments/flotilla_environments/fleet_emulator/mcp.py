"""The two MCP addresses of an instance: its own tools, and the aggregator with `computer`."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flotilla_environments.api import ToolError, ToolSpec
from flotilla_environments.fleet_emulator.computer.screen import Screen
from flotilla_environments.fleet_emulator.computer.tool import COMPUTER, Computer, WithComputer
from flotilla_environments.fleet_emulator.faults import FaultPlan
from flotilla_environments.fleet_emulator.instance_lookup import FleetLookup, UpstreamError
from flotilla_environments.fleet_emulator.request_counters import Counters
from flotilla_environments.server.instance_registry import Registry
from flotilla_environments.server.instance_runner import PREFIX, Runner
from flotilla_environments.server.mcp_tools import ToolEndpoint, Tools

WARMING_UP = "<html><body><h1>503 Service Unavailable</h1></body></html>"


class CountedTools:
    """Tools whose executed calls are counted, without those that the faults remove."""

    def __init__(self, tools: Tools, plan: FaultPlan, counters: Counters) -> None:
        self._tools = tools
        self._plan = plan
        self._counters = counters

    def tools(self) -> list[ToolSpec]:
        removed = self._plan.settings.removed_tools
        return [tool for tool in self._tools.tools() if tool.name not in removed]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name in self._plan.settings.removed_tools:
            raise ToolError(f"unknown tool {name!r}")
        self._counters.tools[name] += 1
        return self._tools.call(name, arguments)


class Desks:
    """The tools of running instances, and the screens of `computer`."""

    def __init__(self, registry: Registry, plan: FaultPlan, counters: Counters) -> None:
        self._registry = registry
        self._plan = plan
        self._counters = counters
        self._computers: dict[str, Computer] = {}

    def get_own_tools(self, instance_id: str) -> Tools:
        """Return the app's tools. Raises `LookupError` for an instance that does not run."""
        record = self._registry.find_record(instance_id)
        if record is None or record.instance is None:
            raise LookupError(instance_id)
        return CountedTools(record.instance, self._plan, self._counters)

    def list_actions(self, instance_id: str) -> list[dict[str, Any]]:
        """Return what `computer` did at an instance's own screen, the newest last."""
        computer = self._computers.get(instance_id)
        return [] if computer is None else [*computer.log]

    def get_all_tools(self, instance_id: str) -> Tools:
        """Return the app's tools and `computer`; an app that draws its own screens has that."""
        own = self.get_own_tools(instance_id)
        if any(tool.name == COMPUTER for tool in own.tools()):
            return own
        computer = self._computers.get(instance_id)
        if computer is None:
            self._forget_stopped()
            computer = self._computers[instance_id] = Computer(
                self._make_screen(instance_id), lambda: self._plan.settings.pictures
            )
        return WithComputer(own, computer)

    def open_page(self, path: str) -> Screen | None:
        """Open a separate screen for a browser; `path` is that of an instance's root."""
        try:
            return self._make_screen(path.strip("/"))
        except LookupError:
            return None

    def clear_screen(self, instance_id: str) -> None:
        """Forget the screen: the next one starts fresh."""
        self._computers.pop(instance_id, None)

    def _make_screen(self, instance_id: str) -> Screen:
        tools = self.get_own_tools(instance_id)
        record = self._registry.find_record(instance_id)
        assert record is not None
        return Screen(record.wanted.env_key.capitalize(), tools)

    def _forget_stopped(self) -> None:
        live = {record.instance_id for record in self._registry.live_records()}
        for instance_id in self._computers.keys() - live:
            del self._computers[instance_id]


class FleetRunner(Runner):
    def __init__(self, lookup: FleetLookup, desks: Desks) -> None:
        super().__init__(lookup)
        self._desks = desks

    def build_routes(self) -> list[Route]:
        return [
            *super().build_routes(),
            Route(f"{PREFIX}/diff/fs", self.diff_files, methods=["POST"]),
        ]

    async def diff_files(self, request: Request) -> Response:
        """Report the changes in the instance's file system: none, for the apps write no files."""
        self._lookup.find_running(request)
        counts = {"total_files": 0, "total_size": 0}
        about = {"success": True, "source": "none", "message": "no file has changed"}
        return JSONResponse({**about, "files": [], **counts})

    async def reset_instance(self, request: Request) -> Response:
        answer = await super().reset_instance(request)
        self._desks.clear_screen(request.path_params["instance_id"])
        return answer


class InstanceTools:
    """ASGI application of one of the addresses; `choose` finds the tools of an instance by id."""

    def __init__(
        self,
        lookup: FleetLookup,
        endpoint: ToolEndpoint,
        plan: FaultPlan,
        now: Callable[[], float],
        choose: Callable[[str], Tools],
    ) -> None:
        self._lookup = lookup
        self._endpoint = endpoint
        self._plan = plan
        self._now = now
        self._choose = choose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        self._lookup.find_running(request)
        record = self._lookup.find_record(request)
        warm_at = (record.started_at or 0.0) + self._plan.settings.mcp_warmup
        if self._now() < warm_at:
            raise UpstreamError(503, WARMING_UP)
        await self._endpoint.serve_request(self._choose(record.instance_id), scope, receive, send)
