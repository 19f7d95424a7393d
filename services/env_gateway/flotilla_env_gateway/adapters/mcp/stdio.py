"""MCP servers over standard input and output: processes of an episode's own."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.tasks.task_format import Task
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.adapters.mcp.episode_process import EpisodeProcesses, EpisodeServers
from flotilla_env_gateway.adapters.mcp.joined_instance import join_instances, naming_server
from flotilla_env_gateway.adapters.mcp.read_only import mark_tools
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.adapters.mcp.stdio_transport import StdioTransport
from flotilla_env_gateway.adapters.mcp.warm_pool import WarmPool
from flotilla_env_gateway.adapters.process_usage import measure_usage
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.config.gateway import WarmStartsConfig
from flotilla_env_gateway.ports import (
    Backend,
    BackendError,
    CallResult,
    Instance,
    ProvisionRequest,
    Tool,
)

_LOG = get_logger(__name__)
_RESET_S = 30.0


class StdioEpisode:
    """The processes of one episode, and a session with each. `unanswered` counts the calls that
    have, or may have, not ended. `listed_ahead` are the tools of servers that nobody has asked
    since: an opening episode takes them from there."""

    def __init__(self, servers: Sequence[McpServer], processes: EpisodeProcesses) -> None:
        self.processes = processes
        self.unanswered = 0
        self.listed_ahead: dict[str, Sequence[Tool]] = {}
        self._servers = servers
        self._started_at = loop_time()
        self._not_listed = {server.name for server in servers}
        self.sessions = [
            McpSession(partial(StdioTransport, child, server.answer_limits))
            for server, child in zip(servers, processes.children, strict=True)
        ]

    def note_listed(self, server: str) -> bool:
        """Note that a server has listed its tools; return True once, when all have."""
        was_starting = bool(self._not_listed)
        self._not_listed.discard(server)
        return was_starting and not self._not_listed

    @property
    def age_s(self) -> float:
        """Seconds since the processes run."""
        return loop_time() - self._started_at

    @property
    def pids(self) -> list[int]:
        """The processes that all others of the servers descend from."""
        return [child.pid for child in self.processes.children]

    async def open_sessions(self) -> None:
        """Open the sessions ahead of their first use, and list the tools. Raises BackendError, also
        for a server without its `reset_tool`."""
        for server, session in zip(self._servers, self.sessions, strict=True):
            name = server.name
            # A list that changes from here on is forgotten, also while it is on its way.
            self.listed_ahead[name] = ()
            session.on_tools_changed = partial(self._forget_list, name)
            with naming_server(name):
                tools = await session.list_tools(server.start_timeout_s)
            if name in self.listed_ahead:
                self.listed_ahead[name] = tools
            self.note_listed(name)
            if server.reset_tool not in (None, *(tool.name for tool in tools)):
                why = f"server {name}: it has no tool {server.reset_tool!r} (reset_tool)"
                raise BackendError("no_tools", why, delivered=False, invalid=True)

    def _forget_list(self, server: str) -> None:
        self.listed_ahead.pop(server, None)

    @property
    def is_lost(self) -> bool:
        """True once a server is known to have ended."""
        return any(session.lost for session in self.sessions)

    @property
    def is_reusable(self) -> bool:
        """True if all servers can be brought back to their beginning."""
        return all(each.state_in_folder or each.reset_tool for each in self._servers)

    async def reset_state(self) -> bool:
        """Bring folder and servers back to their beginning; return False if that failed, or is not
        possible."""
        if self.unanswered or self.is_lost:
            return False
        resets = [
            (session, server.reset_tool)
            for server, session in zip(self._servers, self.sessions, strict=True)
            if server.reset_tool is not None
        ]
        try:
            await self.processes.restore_folder()
            results = [await each.call_tool(tool, {}, _RESET_S) for each, tool in resets]
            await self.open_sessions()
        except (OSError, BackendError) as error:
            _LOG.warning("reset_failed", error=str(error))
            return False
        failed = [
            tool for (_, tool), result in zip(resets, results, strict=True) if result.is_error
        ]
        if failed:
            _LOG.warning("reset_failed", error=f"{', '.join(failed)} answered an error")
        return not failed

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
        episode: StdioEpisode,
        server: McpServer,
        session: McpSession,
    ) -> None:
        self.instance_id = f"stdio-{request.episode_id}"
        self.env_version = request.task.env_version
        self._episode_id = request.episode_id
        self._backend = backend
        self._episode = episode
        self._server = server
        self._session = session

    @property
    def end_reason(self) -> str | None:
        return self._session.lost or None

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        tools = self._episode.listed_ahead.pop(self._server.name, None)
        if tools is None:
            tools = await self._session.list_tools(timeout_s)
        if hidden := self._server.reset_tool:
            tools = [tool for tool in tools if tool.name != hidden]
        if self._episode.note_listed(self._server.name):
            self._backend.note_start(self._episode)
        return await mark_tools(tools, self._server)

    def watch_tools(self, changed: Callable[[], None]) -> None:
        self._session.on_tools_changed = changed

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        # One that is cancelled or unanswered may still be running.
        self._episode.unanswered += 1
        result = await self._session.call_tool(name, arguments, timeout_s)
        self._episode.unanswered -= 1
        return result

    async def is_alive(self, *, timeout_s: float) -> bool:
        return await self._session.is_alive(timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        await self._backend.end_episode(self._episode_id)


class McpStdioBackend(Backend):
    """Backend that starts the command of each of its servers once per episode; the processes end
    with the gateway in any case."""

    isolates_instances = True

    def __init__(self, *servers: McpServer, warm: WarmStartsConfig | None = None) -> None:
        """Raises ConfigError."""
        self._servers = servers
        self._starter = EpisodeServers(servers)
        self._running: dict[str, tuple[StdioEpisode, dict[str, Instance]]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.pool: WarmPool[StdioEpisode] | None = None
        self._name = name = "+".join(server.name for server in servers)
        self._start_told = False
        if warm is None or not warm.size:
            return
        if bound := [server.name for server in servers if server.task_variables]:
            why = f"task_variables is true for {', '.join(bound)}"
            _LOG.warning("servers_not_started_ahead", servers=name, why=why)
            return
        self.pool = WarmPool(name, self._start_ahead, warm)

    async def provision_instance(self, request: ProvisionRequest, *, timeout_s: float) -> Instance:
        return join_instances(request, await self.provision_servers(request))

    async def provision_servers(self, request: ProvisionRequest) -> Mapping[str, Instance]:
        """Start the servers of an episode; return an instance for each, by name. Raises
        BackendError."""
        if request.episode_id not in self._running:
            episode = await self.pool.take() if self.pool is not None else None
            if episode is None:
                try:
                    episode = await self._start(_episode_environment(request.task))
                except OSError as error:
                    raise BackendError("not_started", str(error), delivered=False) from error
            instances: dict[str, Instance] = {
                server.name: StdioInstance(self, request, episode, server, session)
                for server, session in zip(self._servers, episode.sessions, strict=True)
            }
            self._running[request.episode_id] = episode, instances
        return self._running[request.episode_id][1]

    async def end_episode(self, episode_id: str) -> None:
        """End the processes of an episode. Goes on if the caller is cancelled. Idempotent."""
        known = self._running.pop(episode_id, None)
        if known is not None:
            ending = self._ending[episode_id] = asyncio.create_task(self._end(known[0]))
            ending.add_done_callback(lambda _: self._ending.pop(episode_id, None))
        if episode_id in self._ending:
            await asyncio.shield(self._ending[episode_id])

    async def close(self) -> None:
        episodes = {*self._running, *self._ending}
        if self.pool is not None:
            await self.pool.close()
        await asyncio.gather(*(self.end_episode(episode_id) for episode_id in episodes))
        await self._starter.close()

    def note_start(self, episode: StdioEpisode) -> None:
        """Tell, for the first episode, what it costs to start its servers."""
        if self._start_told:
            return
        self._start_told = True
        seconds, usage = episode.age_s, measure_usage(episode.pids)
        _LOG.info(
            "servers_started",
            servers=self._name,
            seconds=round(seconds, 3),
            cpu_s=round(usage.cpu_s, 2),
            mib=usage.memory_bytes // 2**20,
        )

    async def _start(self, variables: Mapping[str, str]) -> StdioEpisode:
        return StdioEpisode(self._servers, await self._starter.start_processes(variables))

    async def _start_ahead(self) -> StdioEpisode:
        """Start servers for an episode that is not known yet. Raises OSError and BackendError."""
        episode = await self._start({})
        try:
            await episode.open_sessions()
        except BaseException:
            await episode.close()
            raise
        self.note_start(episode)
        return episode

    async def _end(self, episode: StdioEpisode) -> None:
        """Close servers, unless they can be given to another episode."""
        if self.pool is None:
            await episode.close()
        else:
            await self.pool.give_back(episode)


def _episode_environment(task: Task) -> dict[str, str]:
    """Build the environment variables that identify a server's episode."""
    return {
        "FLOTILLA_TASK_KEY": task.key,
        "FLOTILLA_DATA_KEY": task.data_key,
        "FLOTILLA_DATA_VERSION": task.data_version,
        "FLOTILLA_ENV_VARIABLES": json.dumps(dict(task.raw_variables)),
    }
