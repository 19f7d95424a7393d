"""One MCP server that all episodes share, and that is replaced while the gateway runs."""

from typing import Any

from aiohttp import web

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.mcp.backend import McpBackend
from flotilla_env_gateway.adapters.supervised_server import FixedAddress
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.ports import ProvisionRequest
from tests.env_gateway.adapters.mcp.test_session import answer, server_with
from tests.support.fake_gateway import task_json


async def test_the_tools_of_a_server_that_was_replaced_are_those_of_the_new_one() -> None:
    names = ["of_the_old_one"]

    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
        return answer(message, {"tools": tools})

    async def offered(backend: McpBackend, episode_id: str) -> list[str]:
        task = parse_task(task_json(version="v1"))
        instance = await backend.provision_instance(
            ProvisionRequest(episode_id, task, 60.0), timeout_s=5.0
        )
        listed = [tool.name for tool in await instance.list_tools(timeout_s=5.0)]
        await instance.close(timeout_s=5.0)
        return listed

    async with server_with(handle, session_id=None) as (url, _):
        http = open_http_session(max_connections=4, headers={})
        backend = McpBackend(McpServer(url=url), FixedAddress(url), http)
        assert await offered(backend, "e1") == ["of_the_old_one"]
        names[:] = ["of_the_new_one"]
        assert await offered(backend, "e2") == ["of_the_new_one"]
        await backend.close()
