"""The tools of an instance, from those of its MCP endpoints that serve any.

An image serves tools at `{root}mcp`, at the aggregator `{root}api/v1/mcp`, or at both; a proxy in
front answers 404, 502 or 503 for an endpoint that does not run (yet). The endpoint of each tool is
found once per version of an environment, and cached."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.tasks.task_format import SCREEN_MODALITIES
from flotilla_env_gateway.adapters.http_client import HttpError
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.ports import BackendError, CallResult, Tool
from flotilla_env_gateway.tools.tool_selection import COMPUTER

# How long to wait for an endpoint that fails otherwise than by 404 while the other serves.
_GRACE_S = 10.0
_PROBE_S = 15.0
_ABSENT = (404, 405)


@dataclass(frozen=True, slots=True)
class ToolRoutes:
    """Endpoints that serve tools for a task, by their position. `final` unless an endpoint failed
    during discovery."""

    used: Sequence[int]
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
        self._has_screen = key[2] in (*SCREEN_MODALITIES, "joint")
        self._mark_tool = mark_tool
        # Endpoints of the tools, as they were first listed.
        self._owners: Mapping[str, int] = {}
        self._served_at: float | None = None

    async def list_tools(self, timeout_s: float) -> Sequence[Tool]:
        """List the tools of all endpoints, or of those that are known to serve any. Raises
        BackendError while they are not ready."""
        known = self._memory.get(self._key)
        is_final = known is not None and known.final
        asked = known.used if known is not None and is_final else range(len(self._sessions))
        probe_s = min(_PROBE_S, timeout_s)
        answers = await asyncio.gather(
            *(_probe_endpoint(self._sessions[index], probe_s) for index in asked)
        )
        found = dict(zip(asked, answers, strict=True))
        errors = [answer for answer in answers if isinstance(answer, BackendError)]
        failed = [error for error in errors if not _is_absent(error)]
        tools, owners = self._merge_tools(found)
        is_served = bool(owners.keys() - {COMPUTER} if len(self._sessions) > 1 else owners)
        if not failed and (errors or not is_served):
            # The tools may be served elsewhere by now.
            self._memory.pop(self._key, None)
        if not is_served:
            raise _no_tools_error({self._urls[i]: found[i] for i in asked}, failed)
        if errors and is_final:
            raise errors[0]
        if failed and not self._tolerates_failure(known):
            raise failed[0]
        if not is_final:
            self._memory[self._key] = ToolRoutes(sorted({*owners.values()}), final=not failed)
        self._owners = self._owners or owners
        return tools

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> CallResult:
        session = self._sessions[self._owners.get(name, 0)]
        return await session.call_tool(name, arguments, timeout_s)

    async def close(self) -> None:
        """Forget the sessions, which end with the instance."""
        for session in self._sessions:
            await session.close()

    def _tolerates_failure(self, known: ToolRoutes | None) -> bool:
        """Return True if one endpoint, here or in an earlier instance, has served for so long that
        the other need not be awaited."""
        now = loop_time()
        self._served_at = self._served_at or now
        return known is not None or now - self._served_at >= _GRACE_S

    def _merge_tools(
        self, found: Mapping[int, "Sequence[Tool] | BackendError"]
    ) -> tuple[Sequence[Tool], Mapping[str, int]]:
        """Return the tools of all endpoints, and the endpoint of each."""
        tools: dict[str, Tool] = {}
        owners: dict[str, int] = {}
        for index, listed in found.items():
            for tool in () if isinstance(listed, BackendError) else listed:
                # A task for tools needs no endpoint that serves it nothing but the screen.
                if tool.name not in tools and (self._has_screen or tool.name != COMPUTER):
                    tools[tool.name] = self._mark_tool(tool)
                    owners[tool.name] = index
        return list(tools.values()), owners


async def _probe_endpoint(session: McpSession, timeout_s: float) -> "Sequence[Tool] | BackendError":
    try:
        return await session.list_tools(timeout_s)
    except BackendError as error:
        return error


def _is_absent(error: BackendError) -> bool:
    """Return True if the instance lacks the endpoint; a session reports a repeated 404 as lost."""
    return error.lost or (isinstance(error, HttpError) and error.status in _ABSENT)


def _no_tools_error(
    found: Mapping[str, "Sequence[Tool] | BackendError"], failed: Sequence[BackendError]
) -> BackendError:
    if failed:
        return failed[0]
    reasons = "; ".join(
        f"{url}: {answer if isinstance(answer, BackendError) else len(answer)}"
        for url, answer in found.items()
    )
    return BackendError("no_tools", f"no tools are served yet ({reasons})", delivered=False)
