"""The backend of MCP servers: an episode gets those that its task or environment names."""

import asyncio
from collections.abc import Mapping, Sequence

from flotilla_common.aio.concurrency import cancel_tasks, raise_failure
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.tasks.task_format import Task
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.adapters.mcp.backend import McpBackend, build_mcp_backend
from flotilla_env_gateway.adapters.mcp.episode_process import read_settings
from flotilla_env_gateway.adapters.mcp.joined_instance import join_instances, naming_server
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.ports import (
    Backend,
    BackendError,
    Instance,
    Orphan,
    PoolState,
    ProvisionRequest,
)

_LOG = get_logger(__name__)


class McpServersBackend(Backend):
    """One backend for each server over HTTP, and one for each set of servers over stdio that
    episodes need together: these share the episode's folder."""

    def __init__(self, config: EnvGatewayConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self._servers = {server.name: server for server in config.servers}
        self.isolates_instances = all(
            server.transport == "stdio" or server.instances for server in config.servers
        )
        self._over_stdio: dict[tuple[str, ...], McpStdioBackend] = {}
        for server in config.servers:
            read_settings([server])
        for environment in config.environments.values():
            self._join_stdio(environment.servers)
        if len(self._servers) == 1:
            self._join_stdio([*self._servers])
        self._over_http: dict[str, McpBackend] = {
            server.name: build_mcp_backend(server, max_calls=config.limits.max_calls)
            for server in config.servers
            if server.transport != "stdio"
        }

    async def provision_instance(self, request: ProvisionRequest, *, timeout_s: float) -> Instance:
        names = self._choose_servers(request.task)
        try:
            stdio = self._join_stdio(names)
        except ConfigError as error:
            raise _refusal(str(error)) from error
        starts = [
            asyncio.create_task(self._provision_one(name, request, timeout_s))
            for name in names
            if name in self._over_http
        ]
        if stdio is not None:
            starts.append(asyncio.create_task(stdio.provision_servers(request)))
        try:
            await asyncio.wait(starts)
            raise_failure(starts)
        except BaseException as error:
            await cancel_tasks(starts)
            if await _close_made(starts, timeout_s) and isinstance(error, BackendError):
                error.delivered = None
            raise
        found = {name: part for start in starts for name, part in start.result().items()}
        return join_instances(request, {name: found[name] for name in names})

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        if len(self._over_http) > 1 or self._over_stdio:
            # The id may be one of several servers, or that of joined instances.
            orphan = Orphan(orphan.episode_id)
        for backend in self._over_http.values():
            await backend.reclaim_orphan(orphan, timeout_s=timeout_s)

    @property
    def refused_key(self) -> str | None:
        refusals = ((name, each.refused_key) for name, each in self._over_http.items())
        return next((f"server {name}: {why}" for name, why in refusals if why), None)

    @property
    def warm_pools(self) -> Sequence[PoolState]:
        pools = (backend.pool for backend in self._over_stdio.values())
        return [PoolState(pool.name, pool.ready, pool.size) for pool in pools if pool is not None]

    async def close(self) -> None:
        backends = [*self._over_http.values(), *self._over_stdio.values()]
        await asyncio.gather(*(backend.close() for backend in backends))

    def _choose_servers(self, task: Task) -> list[str]:
        """Return the names of a task's servers, in the order of the settings. Raises
        BackendError."""
        environment = self._config.environments.get(task.env_key)
        named = task.servers or (environment.servers if environment else ())
        known = ", ".join(self._servers)
        for name in named:
            if name not in self._servers:
                raise _refusal(
                    f"task {task.key[:100]!r} needs the server {name[:100]!r}; those in"
                    f" [[env_gateway.servers]]: {known}"
                )
        if not named and len(self._servers) > 1:
            raise _refusal(
                f"which of the servers {known} does task {task.key[:100]!r} need? Name them in"
                f" env_gateway.environments.{task.env_key}.servers, or in the task's `servers`"
            )
        return [name for name in self._servers if name in named or not named]

    def _join_stdio(self, names: Sequence[str]) -> McpStdioBackend | None:
        """Return the backend of those servers that are reached over stdio; None for none. Raises
        ConfigError."""
        chosen = tuple(
            name
            for name, server in self._servers.items()
            if name in names and server.transport == "stdio"
        )
        if chosen and chosen not in self._over_stdio:
            servers = [self._servers[name] for name in chosen]
            self._over_stdio[chosen] = McpStdioBackend(*servers, warm=self._config.warm_starts)
        return self._over_stdio.get(chosen)

    async def _provision_one(
        self, name: str, request: ProvisionRequest, timeout_s: float
    ) -> Mapping[str, Instance]:
        with naming_server(name):
            backend = self._over_http[name]
            return {name: await backend.provision_instance(request, timeout_s=timeout_s)}


async def _close_made(
    starts: Sequence[asyncio.Task[Mapping[str, Instance]]], timeout_s: float
) -> bool:
    """Close the instances that were made; return whether one of any may be left."""
    failures = [each.exception() for each in starts if not each.cancelled()]
    left = any(isinstance(each, BackendError) and each.delivered is None for each in failures)
    for start in starts:
        if not start.cancelled() and start.exception() is None:
            for part in start.result().values():
                try:
                    await part.close(timeout_s=timeout_s)
                except BackendError as error:
                    _LOG.warning("instance_left", instance=part.instance_id, error=str(error))
                    left = True
    return left


def _refusal(message: str) -> BackendError:
    return BackendError("no_server", message, delivered=False, invalid=True)
