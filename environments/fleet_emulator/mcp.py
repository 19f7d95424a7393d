"""The two MCP addresses of an instance: its own tools, and the aggregator with `computer`."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from environments.api import ToolSpec
from environments.fleet_emulator.counters import Counters
from environments.fleet_emulator.faults import Plan
from environments.fleet_emulator.lookup import FleetLookup, UpstreamError
from environments.server.tools import ToolEndpoint, Tools

WARMING_UP = "<html><body><h1>503 Service Unavailable</h1></body></html>"


class Counted:
    """Tools whose executed calls are counted."""

    def __init__(self, tools: Tools, counters: Counters) -> None:
        self._tools = tools
        self._counters = counters

    def tools(self) -> list[ToolSpec]:
        return self._tools.tools()

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        self._counters.tools[name] += 1
        return self._tools.call(name, arguments)


class InstanceTools:
    """ASGI application of one of the addresses; `choose` finds the tools of an instance by id."""

    def __init__(
        self,
        lookup: FleetLookup,
        endpoint: ToolEndpoint,
        plan: Plan,
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
        self._lookup.running(request)
        record = self._lookup.record(request)
        warm_at = (record.started_at or 0.0) + self._plan.settings.mcp_warmup
        if self._now() < warm_at:
            raise UpstreamError(503, WARMING_UP)
        await self._endpoint.serve(self._choose(record.instance_id), scope, receive, send)
