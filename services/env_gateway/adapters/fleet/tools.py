"""The tools of an instance, from those of its MCP endpoints that serve any.

An image serves tools at `{root}mcp`, at the aggregator `{root}api/v1/mcp`, or at both; a proxy in
front answers 404, 502 or 503 for an endpoint that does not run (yet). The endpoint of each tool is
found once per version of an environment, and cached."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.deadlines import loop_time
from services.env_gateway.adapters.http_client import HttpError
from services.env_gateway.adapters.mcp.session import McpSession
from services.env_gateway.ports import BackendError, CallResult, Tool
from services.env_gateway.tools.tool_selection import COMPUTER

# How long to wait for an endpoint that fails otherwise than by 404 while the other serves.
_GRACE_S = 10.0
_PROBE_S = 15.0
_ABSENT = (404, 405)


@dataclass(frozen=True, slots=True)
class ToolRoutes:
    """Tools and their endpoints. `final` unless an endpoint failed during discovery."""

    tools: tuple[Tool, ...]
    owners: Mapping[str, int]
    final: bool


# Key: environment, its version, and the task's modality.
RouteCache = dict[tuple[str, str, str], ToolRoutes]


class FleetTools:
    """Endpoints of one instance, in the precedence of their tools."""

    def __init__(
        self,
        sessions: Mapping[str, McpSession],
        key: tuple[str, str, str],
        memory: RouteCache,
        mark_tool: Callable[[Tool], Tool],
    ) -> None:
        self._urls = list(sessions)
        self._sessions = list(sessions.values())
        self._key = key
        self._memory = memory
        self._mark_tool = mark_tool
        self._routes = ToolRoutes((), {}, final=False)
        self._served_at: float | None = None

    async def list_tools(self, timeout_s: float) -> Sequence[Tool]:
        """List the tools of all endpoints. Raises BackendError while they are not ready."""
        known = self._memory.get(self._key)
        if known is None or not known.final:
            self._memory[self._key] = self._routes = await self._find_routes(known, timeout_s)
            return self._routes.tools
        try:
            # Except the screen's, which sometimes has its own endpoint, opened when needed.
            used = {i for name, i in known.owners.items() if name != COMPUTER} or {0}
            opened = (
                self._sessions[i].open_session(min(_PROBE_S, timeout_s)) for i in sorted(used)
            )
            await asyncio.gather(*opened)
        except HttpError as error:
            if error.status in _ABSENT:
                self._memory.pop(self._key, None)
            raise
        self._routes = known
        return known.tools

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> CallResult:
        session = self._sessions[self._routes.owners.get(name, 0)]
        return await session.call_tool(name, arguments, timeout_s)

    async def close(self) -> None:
        """Forget the sessions, which end with the instance."""
        for session in self._sessions:
            await session.close()

    async def _find_routes(self, known: ToolRoutes | None, timeout_s: float) -> ToolRoutes:
        probe_s = min(_PROBE_S, timeout_s)
        found = await asyncio.gather(
            *(_probe_endpoint(session, probe_s) for session in self._sessions)
        )
        routes = self._merge_tools(found)
        failed = [e for e in found if isinstance(e, BackendError) and not _is_absent(e)]
        only_screen = len(self._sessions) > 1 and not routes.owners.keys() - {COMPUTER}
        if not routes.tools or only_screen:
            raise _no_tools_error(self._urls, found, failed)
        if failed and not self._tolerates_failure(known):
            raise failed[0]
        return routes

    def _tolerates_failure(self, known: ToolRoutes | None) -> bool:
        """Return True if one endpoint, here or in an earlier instance, has served for so long that
        the other need not be awaited."""
        now = loop_time()
        self._served_at = self._served_at or now
        return known is not None or now - self._served_at >= _GRACE_S

    def _merge_tools(self, found: Sequence["Sequence[Tool] | BackendError"]) -> ToolRoutes:
        tools: dict[str, Tool] = {}
        owners: dict[str, int] = {}
        for index, listed in enumerate(found):
            for tool in () if isinstance(listed, BackendError) else listed:
                if tool.name not in tools:
                    tools[tool.name] = self._mark_tool(tool)
                    owners[tool.name] = index
        final = all(not isinstance(e, BackendError) or _is_absent(e) for e in found)
        return ToolRoutes(tuple(tools.values()), owners, final)


async def _probe_endpoint(session: McpSession, timeout_s: float) -> "Sequence[Tool] | BackendError":
    try:
        return await session.list_tools(timeout_s)
    except BackendError as error:
        return error


def _is_absent(error: BackendError) -> bool:
    """Return True if the instance lacks the endpoint; a session reports a repeated 404 as lost."""
    return error.lost or (isinstance(error, HttpError) and error.status in _ABSENT)


def _no_tools_error(
    urls: Sequence[str],
    found: Sequence["Sequence[Tool] | BackendError"],
    failed: Sequence[BackendError],
) -> BackendError:
    if failed:
        return failed[0]
    reasons = "; ".join(
        f"{url}: {answer if isinstance(answer, BackendError) else len(answer)}"
        for url, answer in zip(urls, found, strict=True)
    )
    return BackendError("no_tools", f"no tools are served yet ({reasons})", delivered=False)
