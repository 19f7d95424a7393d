"""MCP servers as environments, with Fleet's instance wire or as one server that all share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from services.env_gateway.adapters.fleet import wire as fleet_wire
from services.env_gateway.adapters.fleet.errors import classified
from services.env_gateway.adapters.http_client import HttpError, http_session, send
from services.env_gateway.adapters.mcp.client import McpSession
from services.env_gateway.adapters.server_address import connect
from services.env_gateway.adapters.supervised_server import Address
from services.env_gateway.config.backends import McpConfig
from services.env_gateway.episodes.task_format import Task
from services.env_gateway.ports import (
    BackendError,
    CallResult,
    Execution,
    Orphan,
    Part,
    Provision,
    QueryError,
    Rows,
    SqlValue,
    Submission,
    Tool,
)

_DATABASES = ("seed", "current")


def build(config: McpConfig, *, max_calls: int) -> "McpBackend":
    """Raises ConfigError when the API key is not in the environment."""
    address, headers = connect(config, where="env_gateway.backends.mcp")
    return McpBackend(config, address, http_session(max_connections=max_calls, headers=headers))


class McpInstance:
    """Tools of one MCP server; what needs the instance wire is refused."""

    data_version = ""

    def __init__(
        self,
        backend: "McpBackend",
        instance_id: str,
        env: tuple[str, str],
        session: McpSession,
        generation: int,
    ) -> None:
        self.instance_id = instance_id
        self.env_version = env[1]
        self._backend = backend
        self._env = env
        self._session = session
        self._generation = generation

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        self._backend.check(self._generation)
        await self._session.open(timeout_s)
        return await self._backend.tools(self._env, self._session, timeout_s)

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        self._backend.check(self._generation)
        return await self._session.call_tool(name, arguments, timeout_s)

    async def query(self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float) -> Rows:
        raise QueryError("a plain MCP server shows no database; set backends.mcp.instances = true")

    async def snapshot(self, db: str, *, timeout_s: float) -> bytes | None:
        return None

    async def observe(self, *, timeout_s: float) -> Sequence[Part]:
        return ()

    async def grade(self, submission: Submission, *, timeout_s: float) -> Execution | None:
        return None

    async def close(self, *, timeout_s: float) -> None:
        if self._backend.current(self._generation):
            await self._session.close(timeout_s)


class FleetWireInstance(McpInstance):
    """An instance of its own, with its databases."""

    def __init__(self, backend: "McpBackend", body: Mapping[str, Any], task: Task, generation: int):
        root = body["urls"]["root"]
        self._state = fleet_wire.state_of(body, task)
        session = backend.session(f"{root}mcp")
        super().__init__(backend, body["instance_id"], self._state.env, session, generation)
        self.data_version = self._state.data_version
        self._runner = f"{root}api/v1/env"

    async def query(self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float) -> Rows:
        self._backend.check(self._generation)
        if db not in _DATABASES:
            # The server would answer 404, as for an instance that is gone.
            raise QueryError(f"no database {db!r}: use {' or '.join(map(repr, _DATABASES))}")
        url = fleet_wire.query_url(self._runner, db)
        body = fleet_wire.query_body(sql, list(args))
        try:
            answer = await self._backend.request("POST", url, body=body, timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise
            message = f"the environment is gone: {error}"
            raise BackendError("lost", message, delivered=False, lost=True) from error
        return fleet_wire.rows_of(answer)

    async def snapshot(self, db: str, *, timeout_s: float) -> bytes | None:
        ask = lambda name, sql: self.query(name, sql, (), timeout_s=timeout_s)  # noqa: E731
        return await self._backend.snapshots.get(db, self._state, ask)

    async def alive(self, *, timeout_s: float) -> bool:
        return self._backend.current(self._generation) and await self._backend.runs(
            self.instance_id, timeout_s
        )

    async def close(self, *, timeout_s: float) -> None:
        if self._backend.current(self._generation):
            await self._backend.delete(self.instance_id, timeout_s)


class McpBackend:
    """`address` says where the server is now. Its generation grows when a supervised server is
    started anew, which ends all instances of the one before."""

    apart = False

    def __init__(self, config: McpConfig, address: Address, http: aiohttp.ClientSession) -> None:
        self._config = config
        self._address = address
        self._http = http
        self._tools: dict[tuple[str, str], Sequence[Tool]] = {}
        self.snapshots = fleet_wire.Snapshots()

    def serves(self, env_key: str) -> bool:
        return True

    async def provision(self, request: Provision, *, timeout_s: float) -> McpInstance:
        url = await self._address.url(timeout_s)
        generation = self._address.generation
        task = request.task
        if not self._config.instances:
            env = (task.env_key, task.env_version)
            session = self.session(url if url.endswith("/mcp") else f"{url}/mcp")
            return McpInstance(self, f"shared-{request.episode_id}", env, session, generation)
        body = await self._create(url, request, timeout_s)
        return FleetWireInstance(self, body, task, generation)

    async def reclaim(self, orphan: Orphan, *, timeout_s: float) -> None:
        if not self._config.instances:
            return
        if orphan.instance_id is not None:
            await self.delete(orphan.instance_id, timeout_s)
            return
        url = await self._address.url(timeout_s)
        path = f"{fleet_wire.INSTANCES}/batch?{fleet_wire.run_query(orphan.episode_id)}"
        await self.request("DELETE", f"{url}{path}", timeout_s=timeout_s)

    async def delete(self, instance_id: str, timeout_s: float) -> None:
        url = await self._address.url(timeout_s)
        path = fleet_wire.instance_path(instance_id)
        try:
            await self.request("DELETE", f"{url}{path}", timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise

    async def runs(self, instance_id: str, timeout_s: float) -> bool:
        """Asks the control plane, which may answer where the instance does not."""
        url = await self._address.url(timeout_s)
        path = fleet_wire.instance_path(instance_id)
        try:
            body = await self.request("GET", f"{url}{path}", timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise
            return False
        return body.get("status") not in ("stopped", "error")

    async def close(self) -> None:
        await self._http.close()
        await self._address.close()

    def session(self, url: str) -> McpSession:
        return McpSession(self._http, url, limits=self._config.answers)

    async def request(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        kind = {"content-type": "application/json"} if body is not None else {}
        answer, _ = await send(
            self._http,
            method,
            url,
            timeout_s=timeout_s,
            limits=self._config.answers,
            body=body,
            headers={**kind, **(headers or {})},
        )
        return answer

    async def tools(
        self, env: tuple[str, str], session: McpSession, timeout_s: float
    ) -> Sequence[Tool]:
        """One version of an environment has one set of tools, asked for once. Of a server that all
        episodes share nobody knows when it becomes another: it is asked every time."""
        known = self._tools.get(env) if self._config.instances and env[1] else None
        if known is None:
            tools = await session.list_tools(timeout_s)
            if not tools:
                raise BackendError("no_tools", "the server lists no tools yet", delivered=False)
            allowed = self._config.read_only_tools
            known = [replace(t, read_only=t.read_only or t.name in allowed) for t in tools]
            self._tools[env] = known
        return known

    def current(self, generation: int) -> bool:
        return generation == self._address.generation

    def check(self, generation: int) -> None:
        if not self.current(generation):
            message = "the environment server was started anew, without this instance"
            raise BackendError("lost", message, delivered=False, lost=True)

    async def _create(self, url: str, request: Provision, timeout_s: float) -> dict[str, Any]:
        instances = f"{url}{fleet_wire.INSTANCES}"
        headers = {"x-request-id": request.episode_id}
        body = fleet_wire.creation(request)
        try:
            return await self.request(
                "POST", instances, timeout_s=timeout_s, body=body, headers=headers
            )
        except HttpError as error:
            known = fleet_wire.duplicate_of(error.body) if error.status == 409 else None
            if error.status == 403:
                # As many instances as may be: a queue, and no matter of rights.
                raise classified(error) from error
            if known is None:
                raise
        path = fleet_wire.instance_path(known)
        return await self.request("GET", f"{url}{path}", timeout_s=timeout_s)
