"""MCP servers as environments, with Fleet's instance wire or as one shared server."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp

from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.adapters.fleet import wire as fleet_wire
from flotilla_env_gateway.adapters.fleet.errors import classify_error
from flotilla_env_gateway.adapters.http_client import HttpError, exchange_json, open_http_session
from flotilla_env_gateway.adapters.mcp.http_transport import HttpTransport, SseTransport
from flotilla_env_gateway.adapters.mcp.read_only import mark_tools
from flotilla_env_gateway.adapters.mcp.revision import ServerRevision
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.adapters.mcp.transport import Transport
from flotilla_env_gateway.adapters.server_address import connect_server, resolve_references
from flotilla_env_gateway.adapters.supervised_server import ServerAddress
from flotilla_env_gateway.config.backends import McpServer, is_reference
from flotilla_env_gateway.ports import (
    Backend,
    BackendError,
    CallResult,
    Instance,
    Orphan,
    ProvisionRequest,
    QueryError,
    Rows,
    SqlValue,
    Tool,
)

# A refusal of the key is reported for so long.
_LATELY_S = 60.0
_DATABASES = ("seed", "current")


def build_mcp_backend(config: McpServer, *, max_calls: int) -> "McpBackend":
    """Build the backend of an MCP server. Raises ConfigError if the API key, or a variable that a
    header names, is not in the environment."""
    given = resolve_references(config.headers, where=f"{config.where}.headers")
    address, key = connect_server(config, where=config.where)
    headers = {**key, **given}
    return McpBackend(
        config, address, open_http_session(max_connections=max_calls, headers=headers)
    )


class McpInstance(Instance):
    """Tools of one MCP server; operations that need the instance wire are refused."""

    data_version = ""
    no_database = "a plain MCP server shows no database; set instances = true for its server"

    def __init__(
        self,
        backend: "McpBackend",
        instance_id: str,
        env_version: str,
        session: McpSession,
        generation: int,
    ) -> None:
        self.instance_id = instance_id
        self.env_version = env_version
        self._backend = backend
        self._session = session
        self._generation = generation

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        self._backend.require_current(self._generation)
        with self._backend.noting_refusals():
            tools = await self._session.list_tools(timeout_s)
        if not tools:
            raise BackendError("no_tools", "the server lists no tools yet", delivered=False)
        return await self._backend.mark_tools(tools)

    def watch_tools(self, changed: Callable[[], None]) -> None:
        self._session.on_tools_changed = changed

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        self._backend.require_current(self._generation)
        with self._backend.noting_refusals():
            return await self._session.call_tool(name, arguments, timeout_s)

    async def is_alive(self, *, timeout_s: float) -> bool:
        return self._backend.is_current(self._generation) and await self._session.is_alive(
            timeout_s
        )

    async def close(self, *, timeout_s: float) -> None:
        # Of a server that is gone, only our side of the session is left.
        current = self._backend.is_current(self._generation)
        await self._session.close(timeout_s if current else 0.0)

    @property
    def end_reason(self) -> str | None:
        return self._session.lost or None


class FleetWireInstance(McpInstance):
    """A separate instance with its own databases."""

    def __init__(self, backend: "McpBackend", body: Mapping[str, Any], task: Task, generation: int):
        instance_id, root = fleet_wire.read_address(body)
        self._state = fleet_wire.parse_initial_state(body, task)
        session = backend.make_session(f"{root}mcp")
        super().__init__(backend, instance_id, self._state.env[1], session, generation)
        self.data_version = self._state.data_version
        self._runner = f"{root}api/v1/env"

    async def query_database(
        self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float
    ) -> Rows:
        self._backend.require_current(self._generation)
        if db not in _DATABASES:
            # The server would answer 404, as for an instance that is gone.
            raise QueryError(f"no database {db[:100]!r}: use {' or '.join(map(repr, _DATABASES))}")
        url = fleet_wire.query_url(self._runner, db)
        body = fleet_wire.query_body(sql, list(args))
        try:
            answer = await self._backend.send_request("POST", url, body=body, timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise
            message = f"the environment is gone: {error}"
            raise BackendError("lost", message, delivered=False, lost=True) from error
        return fleet_wire.parse_rows(answer)

    async def snapshot_database(self, db: str, *, timeout_s: float) -> bytes | None:
        query = lambda name, sql: self.query_database(name, sql, (), timeout_s=timeout_s)  # noqa: E731
        return await self._backend.snapshots.get_snapshot(db, self._state, query)

    async def is_alive(self, *, timeout_s: float) -> bool:
        return self._backend.is_current(self._generation) and await self._backend.is_running(
            self.instance_id, timeout_s
        )

    async def close(self, *, timeout_s: float) -> None:
        # The server ends the session with the instance.
        await self._session.close(0.0)
        if self._backend.is_current(self._generation):
            await self._backend.delete_instance(self.instance_id, timeout_s)

    @property
    def end_reason(self) -> str | None:
        return None


class McpBackend(Backend):
    """MCP servers as a backend. `address` is the server's current one. Its generation grows when a
    supervised server restarts, which ends all instances of the previous one."""

    def __init__(
        self, config: McpServer, address: ServerAddress, http: aiohttp.ClientSession
    ) -> None:
        self._config = config
        self._address = address
        self._http = http
        # Streams of servers last as long as their sessions, so they take no place of a call.
        self._listening = open_http_session(max_connections=0, headers=http.headers)
        # URLs whose server offers no such stream.
        self._silent: set[str] = set()
        # An instance has its state, whatever the session.
        self._stateless = config.instances or config.sessions == "stateless"
        self._revision = ServerRevision(ask=self._stateless)
        self._refused: tuple[int, float] | None = None
        self.snapshots = fleet_wire.SnapshotCache()

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> McpInstance:
        task = request.task
        if not self._config.instances:
            url = await self._address.wait_for_url(timeout_s)
            generation = self._address.generation
            session = self.make_session(url)
            instance_id = f"shared-{request.episode_id}"
            return McpInstance(self, instance_id, task.env_version, session, generation)
        url = await self._address.wait_for_root(timeout_s)
        generation = self._address.generation
        body = await self._create_instance(url, request, timeout_s)
        return FleetWireInstance(self, body, task, generation)

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        if not self._config.instances:
            return
        if orphan.instance_id is not None:
            await self.delete_instance(orphan.instance_id, timeout_s)
            return
        url = await self._address.wait_for_root(timeout_s)
        path = f"{fleet_wire.INSTANCES}/batch?{fleet_wire.run_query(orphan.episode_id)}"
        await self.send_request("DELETE", f"{url}{path}", timeout_s=timeout_s)

    async def delete_instance(self, instance_id: str, timeout_s: float) -> None:
        url = await self._address.wait_for_root(timeout_s)
        path = fleet_wire.instance_path(instance_id)
        try:
            await self.send_request("DELETE", f"{url}{path}", timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise

    async def is_running(self, instance_id: str, timeout_s: float) -> bool:
        """Query the control plane, which may answer even if the instance does not."""
        url = await self._address.wait_for_root(timeout_s)
        path = fleet_wire.instance_path(instance_id)
        try:
            body = await self.send_request("GET", f"{url}{path}", timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise
            return False
        return body.get("status") not in ("stopped", "error")

    async def close(self) -> None:
        await self._http.close()
        await self._listening.close()
        await self._address.close()

    @property
    def refused_key(self) -> str | None:
        if self._refused is None or loop_time() - self._refused[1] > _LATELY_S:
            return None
        return f"HTTP {self._refused[0]} from its server; {self._describe_keys()}"

    @contextmanager
    def noting_refusals(self) -> Generator[None]:
        """Name the key's variable in a failure that the server gives for the key."""
        try:
            yield
        except BackendError as error:
            cause = error if isinstance(error, HttpError) else error.__cause__
            if isinstance(cause, HttpError) and cause.status in (401, 403):
                self._refused = cause.status, loop_time()
                error.args = (f"{error}; {self._describe_keys()}",)
            raise

    def _describe_keys(self) -> str:
        headers = self._config.headers.values()
        names = [value[1:] for value in headers if is_reference(value)]
        if self._config.api_key_env:
            names.append(self._config.api_key_env)
        if not names:
            return f"no key is configured: set {self._config.where}.api_key_env, or headers"
        return f"its key is that of the variable {' or '.join(names)}"

    def make_session(self, url: str) -> McpSession:
        return McpSession(
            lambda: self._connect(url), stateless=self._stateless, revision=self._revision
        )

    def _connect(self, url: str) -> Transport:
        limits = self._config.answer_limits
        if self._config.transport == "sse":
            return SseTransport(self._http, self._listening, url, limits=limits)
        listening = self._listening if self._config.listen and not self._stateless else None
        return HttpTransport(
            self._http, url, limits=limits, listening=listening, refusing=self._silent
        )

    async def send_request(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        answer, _ = await exchange_json(
            self._http,
            method,
            url,
            timeout_s=timeout_s,
            limits=self._config.answer_limits,
            body=body,
            headers=headers,
        )
        return answer

    async def mark_tools(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        return await mark_tools(tools, self._config)

    def is_current(self, generation: int) -> bool:
        return generation == self._address.generation

    def require_current(self, generation: int) -> None:
        if not self.is_current(generation):
            message = "the environment server was restarted, without this instance"
            raise BackendError("lost", message, delivered=False, lost=True)

    async def _create_instance(
        self, url: str, request: ProvisionRequest, timeout_s: float
    ) -> dict[str, Any]:
        instances = f"{url}{fleet_wire.INSTANCES}"
        headers = {"x-request-id": request.episode_id}
        body = fleet_wire.creation_body(request)
        try:
            return await self.send_request(
                "POST", instances, timeout_s=timeout_s, body=body, headers=headers
            )
        except HttpError as error:
            known = fleet_wire.find_duplicate_id(error.body) if error.status == 409 else None
            if error.status == 403:
                # The maximum number of instances: a queue, not a matter of permissions.
                raise classify_error(error) from error
            if known is None:
                raise
        path = fleet_wire.instance_path(known)
        return await self.send_request("GET", f"{url}{path}", timeout_s=timeout_s)
