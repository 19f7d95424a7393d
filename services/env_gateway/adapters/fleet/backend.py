"""Fleet's instances as environments: created, kept alive, called, graded and deleted."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from services.env_gateway.adapters.fleet import wire as fleet_wire
from services.env_gateway.adapters.fleet.api import FleetApi
from services.env_gateway.adapters.fleet.browser import Browsers, Lease, joined_id, split_id
from services.env_gateway.adapters.fleet.errors import FleetError, classified
from services.env_gateway.adapters.fleet.heartbeats import Heartbeats
from services.env_gateway.adapters.fleet.screen import (
    SCREENSHOT,
    SHOWN_FIRST,
    checked_page,
    endpoints,
    first_picture,
    image_type,
    navigate,
    page_url,
)
from services.env_gateway.adapters.fleet.tools import FleetTools, Memory
from services.env_gateway.adapters.fleet.verifier import FleetVerifier
from services.env_gateway.adapters.http_client import HttpError, http_session
from services.env_gateway.adapters.mcp.client import McpSession
from services.env_gateway.adapters.server_address import connect
from services.env_gateway.adapters.supervised_server import Address
from services.env_gateway.config.backends import FleetConfig
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
from services.env_gateway.tools.tool_selection import COMPUTER

# What a proxy answers for an instance that has ended, or that only warms up.
_MAYBE_ENDED = (404, 502, 503, 504)
# What every instance has: a 404 for one of them is a fault, and not the statement's.
_DATABASES = ("seed", "current")
_CHECK_S = 5.0


def build(config: FleetConfig, *, max_calls: int) -> "FleetBackend":
    """Raises ConfigError when the API key is not in the environment."""
    address, headers = connect(config, where="env_gateway.backends.fleet")
    # Creations take minutes, and each holds a connection: besides calls, they must not keep the
    # heartbeats waiting for one. How many there are, the gateway's limits say.
    return FleetBackend(config, address, http_session(max_connections=0, headers={}), headers)


@dataclass(frozen=True, slots=True)
class _Doubted:
    """A verifier's run that counts once it is known that the instance ran: when that cannot be told
    just now, it need not be run again."""

    submission: Submission | None = None
    execution: Execution | None = None

    def of(self, submission: Submission) -> Execution | None:
        return self.execution if submission is self.submission else None


class FleetInstance:
    """`instance_id` names the browser besides the instance, where there is one."""

    def __init__(
        self,
        backend: "FleetBackend",
        body: Mapping[str, Any],
        request: Provision,
        lease: Lease | None,
        generation: int,
    ) -> None:
        self._state = fleet_wire.state_of(body, request.task)
        self.env_version = self._state.env[1]
        self.data_version = self._state.data_version
        self._id: str = body["instance_id"]
        self.instance_id = joined_id(self._id, lease)
        self._backend = backend
        self._generation = generation
        self._modality = request.task.modality
        self._region: str | None = body.get("heartbeat_region")
        root: str = body["urls"]["root"]
        self._runner = f"{root}api/v1/env"
        self._page = page_url(body)
        self._page_shown = lease is None
        self._tools = backend.tools(
            endpoints(root, self._modality, lease), self._state.env, request
        )
        self._ended: str | None = None
        self._doubted = _Doubted()

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        until = _now() + timeout_s
        async with self._asking(timeout_s):
            tools = await self._tools.list(timeout_s)
            if not self._page_shown:
                await self._show_page(_left(until))
        return tools

    async def observe(self, *, timeout_s: float) -> Sequence[Part]:
        if self._modality not in SHOWN_FIRST:
            return ()
        result = await self.call(COMPUTER, SCREENSHOT, timeout_s=timeout_s)
        return await first_picture(result, in_browser=self._modality == "browser_use")

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        async with self._asking(timeout_s):
            return await self._tools.call(name, arguments, timeout_s)

    async def grade(self, submission: Submission, *, timeout_s: float) -> Execution | None:
        verifier = self._backend.verifier
        if verifier is None or submission.task.verifier is None:
            return None
        self._check()
        until = _now() + timeout_s
        execution = self._doubted.of(submission)
        if execution is None:
            execution = await self._verified(verifier, submission, until)
        if execution.error is None and execution.result:
            return execution
        # A verifier may also take what an instance that has gone does not answer for a failed
        # task: its zero is one only of an instance that is known to run.
        self._doubted = _Doubted(submission, execution)
        await self._examine(until)
        self._doubted = _Doubted()
        if self._ended is not None:
            return Execution(error=self._ended, stdout=execution.stdout, instance_lost=True)
        return execution

    async def query(self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float) -> Rows:
        url = fleet_wire.query_url(self._runner, db)
        body = fleet_wire.query_body(sql, list(args))
        try:
            async with self._asking(timeout_s):
                answer = await self._backend.api.runner("POST", url, timeout_s=timeout_s, body=body)
        except FleetError as error:
            if error.status != 404 or db in _DATABASES:
                raise
            raise QueryError(f"no database {db!r}: {error}") from error
        return fleet_wire.rows_of(answer)

    async def snapshot(self, db: str, *, timeout_s: float) -> bytes | None:
        ask = lambda name, sql: self.query(name, sql, (), timeout_s=timeout_s)  # noqa: E731
        return await self._backend.snapshots.get(db, self._state, ask)

    async def close(self, *, timeout_s: float) -> None:
        self._backend.heartbeats.forget(self.instance_id)
        if self._generation == self._backend.address.generation:
            await self._backend.delete(self.instance_id, timeout_s)

    @property
    def ended(self) -> str | None:
        return self._ended

    async def beat(self, timeout_s: float) -> None:
        """Tell Fleet that the instance is wanted. Raises BackendError, `lost` when it has ended."""
        self._check()
        try:
            await self._backend.api.heartbeat(self._id, self._region, timeout_s=timeout_s)
        except FleetError as error:
            # What is no fault of the server's, and no matter of too many requests.
            refused = error.status < 500 and error.kind != "throttled"
            if refused and await self._has_ended(_now() + _CHECK_S):
                self._check()
            raise

    def unheard(self, why: str) -> None:
        self._ended = self._ended or why

    async def _show_page(self, timeout_s: float) -> None:
        result = await self._tools.call(COMPUTER, navigate(self._page), timeout_s)
        checked_page(self._page, result)
        self._page_shown = True

    @asynccontextmanager
    async def _asking(self, timeout_s: float) -> AsyncGenerator[None]:
        """Tells an instance that has ended from one that only fails."""
        self._check()
        until = _now() + timeout_s
        try:
            yield
        except BackendError as error:
            if _maybe_ended(error) and await self._has_ended(until):
                self._check()
            if isinstance(error, HttpError):
                raise classified(error) from error
            if not error.lost:
                raise
            # A session says so of a 404, which a proxy gives for a server that is down.
            raise BackendError("not_found", str(error), delivered=False) from error

    async def _verified(
        self, verifier: FleetVerifier, submission: Submission, until: float
    ) -> Execution:
        try:
            return await verifier.run(self._id, submission, _left(until))
        except BackendError as error:
            if error.kind != "throttled" and await self._has_ended(until):
                self._check()
            raise

    async def _has_ended(self, until: float) -> bool:
        """Whether that is certain."""
        with suppress(BackendError):
            await self._examine(until)
        return self._ended is not None

    async def _examine(self, until: float) -> None:
        """Raises BackendError when nobody can say whether the instance runs."""
        if self._ended is None:
            left_s = min(_CHECK_S, until - _now())
            self._ended = await self._backend.ended(self.instance_id, max(0.001, left_s))

    def _check(self) -> None:
        """Raises BackendError. Not delivered: what a call may have done has gone with the rest."""
        if self._generation != self._backend.address.generation:
            self._ended = "the emulator was started anew, without this instance"
        if self._ended is not None:
            raise BackendError("lost", self._ended, delivered=False, lost=True)


class FleetBackend:
    """`address` says where the control plane is now; `headers` carry the API key."""

    apart = True

    def __init__(
        self,
        config: FleetConfig,
        address: Address,
        http: aiohttp.ClientSession,
        headers: Mapping[str, str],
    ) -> None:
        self.address = address
        self.api = FleetApi(config, address, http, headers)
        self.verifier = None
        if config.verify == "remote":
            self.verifier = FleetVerifier(self.api, config.region)
        self.snapshots = fleet_wire.Snapshots()
        self.heartbeats = Heartbeats(ttl_s=config.heartbeat_interval_s)
        self._browsers = Browsers(self.api, config)
        self._memory: Memory = {}
        self._read_only = frozenset(config.read_only_tools)

    def serves(self, env_key: str) -> bool:
        return True

    async def provision(self, request: Provision, *, timeout_s: float) -> FleetInstance:
        until = _now() + timeout_s
        await self.address.url(timeout_s)
        generation = self.address.generation
        body = await self.api.create(
            request, image_type=image_type(request.task.modality), timeout_s=_left(until)
        )
        lease = None
        if request.task.modality == "browser_use":
            lease = await self._browsers.lease(
                request.episode_id,
                page_url(body),
                ttl_s=request.ttl_s,
                timeout_s=_left(until),
            )
        instance = FleetInstance(self, body, request, lease, generation)
        self.heartbeats.watch(instance.instance_id, instance)
        return instance

    async def reclaim(self, orphan: Orphan, *, timeout_s: float) -> None:
        if orphan.instance_id is not None:
            await self.delete(orphan.instance_id, timeout_s)
        else:
            await self.api.delete_run(orphan.episode_id, timeout_s=timeout_s)

    async def delete(self, joined: str, timeout_s: float) -> None:
        """Delete an instance and the browser that was leased for it."""
        until = _now() + timeout_s
        instance_id, *leases = split_id(joined)
        await self.api.delete(instance_id, timeout_s=timeout_s)
        for lease_id in leases:
            await self._browsers.release(lease_id, timeout_s=_left(until))

    async def ended(self, joined: str, timeout_s: float) -> str | None:
        """Why an instance, or its browser, is gone. Raises BackendError when nobody can say."""
        until = _now() + timeout_s
        instance_id, *leases = split_id(joined)
        why = await self.api.ended(instance_id, timeout_s)
        for lease_id in leases:
            why = why or await self._browsers.ended(lease_id, _left(until))
        return why

    @property
    def late(self) -> int:
        return self.heartbeats.late

    @property
    def beating(self) -> int:
        return len(self.heartbeats)

    @property
    def last_failure(self) -> str:
        return self.heartbeats.last_failure

    async def close(self) -> None:
        await self.heartbeats.close()
        await self.api.http.close()
        await self.address.close()

    def tools(self, urls: Sequence[str], env: tuple[str, str], request: Provision) -> FleetTools:
        api = self.api
        sessions = [
            McpSession(api.http, url, headers=api.headers, limits=api.limits) for url in urls
        ]
        key = (*env, request.task.modality)
        return FleetTools(sessions, key, self._memory, self._read_only)


def _maybe_ended(error: BackendError) -> bool:
    if isinstance(error, HttpError | FleetError):
        return error.status in _MAYBE_ENDED
    return error.lost or error.kind in ("connect", "connection")


def _left(until: float) -> float:
    return max(0.001, until - _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
