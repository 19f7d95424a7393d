"""Requests to an MCP server, over any transport."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from services.common.deadlines import loop_time
from services.common.large_values import run_aside_for
from services.env_gateway.adapters.mcp.wire import parse_call_result, parse_tools
from services.env_gateway.ports import BackendError, CallResult, Tool


class McpRequests(ABC):
    """The requests of an environment to one MCP server. All raise BackendError."""

    @abstractmethod
    async def send_request(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        """Send a request and return its result."""

    async def list_tools(self, timeout_s: float) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        until = loop_time() + timeout_s
        while (left_s := until - loop_time()) > 0:
            params = {"cursor": cursor} if cursor else {}
            result = await self.send_request("tools/list", params, left_s)
            tools += await run_aside_for(result, partial(parse_tools, result))
            cursor = result.get("nextCursor")
            if not cursor:
                return tools
        message = f"the list of tools did not end in {timeout_s:.1f} s, nor after {len(tools)}"
        raise BackendError("timeout", message, delivered=None)

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> CallResult:
        params = {"name": name, "arguments": arguments}
        result = await self.send_request("tools/call", params, timeout_s)
        return await run_aside_for(result, lambda: parse_call_result(result))
