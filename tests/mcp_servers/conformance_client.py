"""Client of the official conformance suite: the gateway's own session with a server over HTTP.

The suite runs `python -m tests.mcp_servers.conformance_client URL`, with the name of a scenario in
MCP_CONFORMANCE_SCENARIO. As a policy would, it calls each tool that the server lists."""

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import Any

import aiohttp

from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.mcp.http_transport import HttpTransport
from flotilla_env_gateway.adapters.mcp.session import McpSession

_TIMEOUT_S = 20.0
_ARGUMENTS: dict[str, dict[str, Any]] = {"add_numbers": {"a": 5, "b": 3}}


async def main(url: str) -> None:
    async with (
        open_http_session(max_connections=8, headers={}) as http,
        open_http_session(max_connections=1, headers={}) as listening,
    ):
        listens = asyncio.Event()
        _set_once_answered(listens, listening)
        session = McpSession(lambda: HttpTransport(http, url, listening=listening))
        tools = await session.list_tools(_TIMEOUT_S)
        if os.environ["MCP_CONFORMANCE_SCENARIO"] == "sse-retry":
            # It counts any GET during a call as the call's reconnection, the session's own too.
            await asyncio.wait_for(listens.wait(), _TIMEOUT_S)
        for tool in tools:
            result = await session.call_tool(tool.name, _ARGUMENTS.get(tool.name, {}), _TIMEOUT_S)
            print(tool.name, result)
        await session.close(_TIMEOUT_S)


def _set_once_answered(event: asyncio.Event, http: aiohttp.ClientSession) -> None:
    async def on_request_end(
        _http: aiohttp.ClientSession, _context: SimpleNamespace, _end: aiohttp.TraceRequestEndParams
    ) -> None:
        event.set()

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(on_request_end)
    trace.freeze()
    http.trace_configs.append(trace)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
