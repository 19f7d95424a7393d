"""MCP servers over standard input and output: one process per episode."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.env_gateway.adapters.mcp.episode_process import EpisodeProcess, EpisodeProcesses
from services.env_gateway.adapters.mcp.read_only import mark_read_only
from services.env_gateway.adapters.mcp.session import McpSession
from services.env_gateway.adapters.mcp.stdio_transport import StdioTransport
from services.env_gateway.adapters.server_address import configured_environment
from services.env_gateway.config.backends import McpServer
from services.env_gateway.ports import (
    Backend,
    BackendError,
    CallResult,
    Instance,
    ProvisionRequest,
    Tool,
)
from services.env_gateway.tasks.task_format import Task


class StdioInstance(Instance):
    """The server process of one episode."""

    data_version = ""
    no_database = "a plain MCP server shows no database"

    def __init__(
        self, backend: "McpStdioBackend", request: ProvisionRequest, server: EpisodeProcess
    ) -> None:
        self.instance_id = f"stdio-{request.episode_id}"
        self.env_version = request.task.env_version
        self._backend = backend
        self._server = server
        self._session = McpSession(lambda: StdioTransport(server, backend.limits))

    @property
    def end_reason(self) -> str | None:
        return self._session.lost or None

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        tools = await self._session.list_tools(timeout_s)
        return [self._backend.mark_tool(tool) for tool in tools]

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        return await self._session.call_tool(name, arguments, timeout_s)

    async def is_alive(self, *, timeout_s: float) -> bool:
        return await self._session.is_alive(timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        self._backend.forget_instance(self.instance_id)
        await self._session.close()
        await self._server.close()


class McpStdioBackend(Backend):
    """Backend that starts `command` once per episode; the processes end with the gateway in any
    case."""

    isolates_instances = True

    def __init__(self, config: McpServer) -> None:
        assert config.command is not None, "checked by McpServer"
        self._config = config
        self.limits = config.answer_limits
        self._command = config.command
        environment = configured_environment(config, where="env_gateway.backends.mcp")
        self._processes = EpisodeProcesses(config, environment)
        self._running: dict[str, StdioInstance] = {}

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> StdioInstance:
        known = self._running.get(f"stdio-{request.episode_id}")
        if known is not None:
            return known
        try:
            process = await self._processes.start_process(_episode_environment(request.task))
        except OSError as error:
            message = f"{self._command[0]}: {error}"
            raise BackendError("not_started", message, delivered=False) from error
        instance = StdioInstance(self, request, process)
        self._running[instance.instance_id] = instance
        return instance

    async def close(self) -> None:
        instances = list(self._running.values())
        await asyncio.gather(*(instance.close(timeout_s=1.0) for instance in instances))
        await self._processes.close()

    def forget_instance(self, instance_id: str) -> None:
        self._running.pop(instance_id, None)

    def mark_tool(self, tool: Tool) -> Tool:
        return mark_read_only(tool, self._config)


def _episode_environment(task: Task) -> dict[str, str]:
    """Build the environment variables that identify a server's episode."""
    return {
        "FLOTILLA_TASK_KEY": task.key,
        "FLOTILLA_DATA_KEY": task.data_key,
        "FLOTILLA_DATA_VERSION": task.data_version,
        "FLOTILLA_ENV_VARIABLES": json.dumps(dict(task.raw_variables)),
    }
