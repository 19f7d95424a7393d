"""Client of the official conformance suite: the gateway's own session with a server over HTTP.

The suite runs `python -m tests.mcp_servers.conformance_client URL`, with the name of a scenario in
MCP_CONFORMANCE_SCENARIO. As a policy would, it calls each tool that the server lists."""

import asyncio
import sys
from typing import Any

from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.mcp.http_transport import HttpTransport
from flotilla_env_gateway.adapters.mcp.session import McpSession

_TIMEOUT_S = 20.0
_ARGUMENTS: dict[str, dict[str, Any]] = {"add_numbers": {"a": 5, "b": 3}}


async def main(url: str) -> None:
    async with open_http_session(max_connections=8, headers={}) as http:
        session = McpSession(lambda: HttpTransport(http, url, listening=http))
        for tool in await session.list_tools(_TIMEOUT_S):
            result = await session.call_tool(tool.name, _ARGUMENTS.get(tool.name, {}), _TIMEOUT_S)
            print(tool.name, result)
        await session.close(_TIMEOUT_S)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
