"""MCP servers as environments, with Fleet's instance wire or as one server that all share."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aiohttp

from services.env_gateway import dump
from services.env_gateway.adapters.mcp_client import HttpError, McpSession, http_session, send
from services.env_gateway.adapters.process import Address
from services.env_gateway.adapters.server import connect
from services.env_gateway.backend_config import McpConfig
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
from services.env_gateway.tasks import Task

_SEEDS_KEPT = 128
_MAX_BYTES = 64 * 2**20


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
        env = (task.env_key, body.get("version") or task.env_version)
        super().__init__(
            backend, body["instance_id"], env, backend.session(f"{root}mcp"), generation
        )
        self.data_version = body.get("data_version") or task.data_version
        self._runner = f"{root}api/v1/env"
        variables = json.dumps(task.raw_variables, sort_keys=True)
        self._seed_key = (*env, task.data_key, self.data_version, variables)

    async def query(self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float) -> Rows:
        self._backend.check(self._generation)
        url = f"{self._runner}/resources/sqlite/{quote(db, safe='')}/query"
        body = {"query": sql, "args": list(args), "read_only": True}
        try:
            answer = await self._backend.request("POST", url, body=body, timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise
            message = f"the environment is gone: {error}"
            raise BackendError("lost", message, delivered=False, lost=True) from error
        if not isinstance(answer, dict):
            raise BackendError("protocol", "a query was answered by no object", delivered=None)
        if not answer.get("success"):
            raise QueryError(str(answer.get("error") or answer.get("message")))
        return Rows(tuple(answer.get("columns") or ()), answer.get("rows") or ())

    async def snapshot(self, db: str, *, timeout_s: float) -> bytes | None:
        """The seed is the same for all attempts at a task, and fetched once."""
        seeds = self._backend.seeds
        if db == "seed" and (seed := seeds.get(self._seed_key)) is not None:
            seeds.move_to_end(self._seed_key)
            return seed
        try:
            content = await self._fetch(db, timeout_s)
        except QueryError:
            # The server refuses such statements; the verifier's own may still pass.
            content = None
        if db == "seed" and content is not None:
            seeds[self._seed_key] = content
            if len(seeds) > _SEEDS_KEPT:
                seeds.popitem(last=False)
        return content

    async def close(self, *, timeout_s: float) -> None:
        if self._backend.current(self._generation):
            await self._backend.delete(self.instance_id, timeout_s)

    async def _fetch(self, db: str, timeout_s: float) -> bytes | None:
        schemas = self._backend.schemas
        for _ in range(2):
            schema = schemas.get(self._env)
            if schema is None:
                rows = await self.query(db, dump.SCHEMA_SQL, (), timeout_s=timeout_s)
                schema = dump.parse_schema(rows.rows)
            if schema is None:
                return None
            schemas[self._env] = schema
            dumped = await self.query(db, dump.dump_sql(schema), (), timeout_s=timeout_s)
            if dump.matches(schema, dumped.rows):
                return dump.rebuild(schema, dumped.rows)
            del schemas[self._env]
        return None


class McpBackend:
    """`address` says where the server is now. Its generation grows when a supervised server is
    started anew, which ends all instances of the one before."""

    def __init__(self, config: McpConfig, address: Address, http: aiohttp.ClientSession) -> None:
        self._config = config
        self._address = address
        self._http = http
        self._tools: dict[tuple[str, str], Sequence[Tool]] = {}
        self.schemas: dict[tuple[str, str], dump.Schema] = {}
        self.seeds: OrderedDict[tuple[str, ...], bytes] = OrderedDict()

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
        tag = quote(orphan.episode_id, safe="")
        await self.request(
            "DELETE", f"{url}/v1/env/instances/batch?run_id={tag}", timeout_s=timeout_s
        )

    async def delete(self, instance_id: str, timeout_s: float) -> None:
        url = await self._address.url(timeout_s)
        path = f"{url}/v1/env/instances/{quote(instance_id, safe='')}"
        try:
            await self.request("DELETE", path, timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise

    async def close(self) -> None:
        await self._http.close()
        await self._address.close()

    def session(self, url: str) -> McpSession:
        return McpSession(self._http, url, max_bytes=_MAX_BYTES)

    async def request(self, method: str, url: str, *, timeout_s: float, body: Any = None) -> Any:
        headers = {"content-type": "application/json"} if body is not None else None
        answer, _ = await send(
            self._http,
            method,
            url,
            timeout_s=timeout_s,
            max_bytes=_MAX_BYTES,
            body=body,
            headers=headers,
        )
        return answer

    async def tools(
        self, env: tuple[str, str], session: McpSession, timeout_s: float
    ) -> Sequence[Tool]:
        """One version of an environment has one set of tools, asked for once."""
        known = self._tools.get(env)
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
        task = request.task
        wanted: dict[str, Any] = {
            "env_key": task.env_key,
            "env_version": task.env_version,
            "data_key": task.data_key,
            "data_version": task.data_version,
            "env_variables": task.raw_variables,
            "ttl_seconds": int(request.ttl_s) + 1,
            "run_id": request.episode_id,
            "created_from": "sdk",
        }
        body = {name: value for name, value in wanted.items() if value}
        instances = f"{url}/v1/env/instances"
        headers = {"content-type": "application/json", "x-request-id": request.episode_id}
        try:
            answer, _ = await send(
                self._http,
                "POST",
                instances,
                timeout_s=timeout_s,
                max_bytes=_MAX_BYTES,
                body=body,
                headers=headers,
            )
        except HttpError as error:
            instance_id = _duplicate(error)
            if instance_id is None:
                raise
            answer = await self.request("GET", f"{instances}/{instance_id}", timeout_s=timeout_s)
        return answer


def _duplicate(error: HttpError) -> str | None:
    """The instance that an earlier attempt of the same request has created, if it did."""
    if error.status != 409:
        return None
    try:
        return str(json.loads(error.body)["detail"]["instance_id"])
    except (ValueError, KeyError, TypeError):
        return None
