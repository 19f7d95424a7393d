"""MCP servers over standard input and output: processes of an episode's own."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from services.common.parsing import run_aside
from services.env_gateway.adapters.mcp.episode_process import EpisodeProcesses, EpisodeServers
from services.env_gateway.adapters.mcp.joined_instance import join_instances
from services.env_gateway.adapters.mcp.read_only import mark_read_only
from services.env_gateway.adapters.mcp.session import McpSession
from services.env_gateway.adapters.mcp.stdio_transport import StdioTransport
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

# Marking a tool takes as long as parsing so many bytes.
_TOOL_BYTES = 500


class StdioEpisode:
    """The processes of one episode, and a session with each."""

    def __init__(self, servers: Sequence[McpServer], processes: EpisodeProcesses) -> None:
        self.processes = processes
        self.sessions = [
            McpSession(partial(StdioTransport, child, server.answer_limits))
            for server, child in zip(servers, processes.children, strict=True)
        ]

    async def close(self) -> None:
        """End the processes together. Idempotent."""
        await asyncio.gather(*(session.close() for session in self.sessions))
        await self.processes.close()


class StdioInstance(Instance):
    """One server of an episode. All of them end when the first one is closed."""

    data_version = ""
    no_database = "a plain MCP server shows no database"

    def __init__(
        self,
        backend: "McpStdioBackend",
        request: ProvisionRequest,
        server: McpServer,
        session: McpSession,
    ) -> None:
        self.instance_id = f"stdio-{request.episode_id}"
        self.env_version = request.task.env_version
        self._episode_id = request.episode_id
        self._backend = backend
        self._server = server
        self._session = session

    @property
    def end_reason(self) -> str | None:
        return self._session.lost or None

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        tools = await self._session.list_tools(timeout_s)
        size = len(tools) * _TOOL_BYTES
        return await run_aside(size, lambda: [mark_read_only(t, self._server) for t in tools])

    def watch_tools(self, changed: Callable[[], None]) -> None:
        self._session.on_tools_changed = changed

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        return await self._session.call_tool(name, arguments, timeout_s)

    async def is_alive(self, *, timeout_s: float) -> bool:
        return await self._session.is_alive(timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        await self._backend.end_episode(self._episode_id)


class McpStdioBackend(Backend):
    """Backend that starts the command of each of its servers once per episode; the processes end
    with the gateway in any case."""

    isolates_instances = True

    def __init__(self, *servers: McpServer) -> None:
        """Raises ConfigError."""
        self._servers = servers
        self._starter = EpisodeServers(servers)
        self._running: dict[str, tuple[StdioEpisode, dict[str, Instance]]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def provision_instance(self, request: ProvisionRequest, *, timeout_s: float) -> Instance:
        return join_instances(request, await self.provision_servers(request))

    async def provision_servers(self, request: ProvisionRequest) -> Mapping[str, Instance]:
        """Start the servers of an episode; return an instance for each, by name. Raises
        BackendError."""
        if request.episode_id not in self._running:
            try:
                variables = _episode_environment(request.task)
                processes = await self._starter.start_processes(variables)
            except OSError as error:
                raise BackendError("not_started", str(error), delivered=False) from error
            episode = StdioEpisode(self._servers, processes)
            instances: dict[str, Instance] = {
                server.name: StdioInstance(self, request, server, session)
                for server, session in zip(self._servers, episode.sessions, strict=True)
            }
            self._running[request.episode_id] = episode, instances
        return self._running[request.episode_id][1]

    async def end_episode(self, episode_id: str) -> None:
        """End the processes of an episode. Goes on if the caller is cancelled. Idempotent."""
        known = self._running.pop(episode_id, None)
        if known is not None:
            ending = self._ending[episode_id] = asyncio.create_task(known[0].close())
            ending.add_done_callback(lambda _: self._ending.pop(episode_id, None))
        if episode_id in self._ending:
            await asyncio.shield(self._ending[episode_id])

    async def close(self) -> None:
        episodes = {*self._running, *self._ending}
        await asyncio.gather(*(self.end_episode(episode_id) for episode_id in episodes))
        await self._starter.close()


def _episode_environment(task: Task) -> dict[str, str]:
    """Build the environment variables that identify a server's episode."""
    return {
        "FLOTILLA_TASK_KEY": task.key,
        "FLOTILLA_DATA_KEY": task.data_key,
        "FLOTILLA_DATA_VERSION": task.data_version,
        "FLOTILLA_ENV_VARIABLES": json.dumps(dict(task.raw_variables)),
    }
