"""An instance at Fleet: kept alive, called and graded while it runs."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.tasks.task_format import SCREEN_MODALITIES
from flotilla_env_gateway.adapters.fleet import wire as fleet_wire
from flotilla_env_gateway.adapters.fleet.browser import BrowserLease, join_id
from flotilla_env_gateway.adapters.fleet.connection import FleetConnection
from flotilla_env_gateway.adapters.fleet.errors import FleetError, classify_error
from flotilla_env_gateway.adapters.fleet.screen import (
    SCREENSHOT,
    check_page_opened,
    navigate_action,
    page_url,
    parse_screenshot,
    tool_endpoints,
)
from flotilla_env_gateway.adapters.fleet.verifier import FleetVerifier
from flotilla_env_gateway.adapters.http_client import HttpError
from flotilla_env_gateway.ports import (
    BackendError,
    CallResult,
    Execution,
    Instance,
    Part,
    ProvisionRequest,
    QueryError,
    Rows,
    SqlValue,
    Submission,
    Tool,
)
from flotilla_env_gateway.tools.tool_selection import COMPUTER

# A proxy's answers for an instance that has ended, or is still warming up.
_MAYBE_ENDED = (404, 502, 503, 504)
# Databases of every instance: a 404 for one of them is not the statement's fault.
_DATABASES = ("seed", "current")
_CHECK_S = 5.0


@dataclass(frozen=True, slots=True)
class _UnconfirmedRun:
    """A verifier's run that counts once the instance is known to have been running. Until then it
    is kept, so that it need not be repeated."""

    submission: Submission | None = None
    execution: Execution | None = None

    def for_submission(self, submission: Submission) -> Execution | None:
        return self.execution if submission is self.submission else None


class FleetInstance(Instance):
    """One instance at Fleet. `instance_id` also names its browser, if there is one."""

    def __init__(
        self,
        connection: FleetConnection,
        body: Mapping[str, Any],
        request: ProvisionRequest,
        lease: BrowserLease | None,
        generation: int,
    ) -> None:
        self._state = fleet_wire.parse_initial_state(body, request.task)
        self.env_version = self._state.env[1]
        self.data_version = self._state.data_version
        self._id, root = fleet_wire.read_address(body)
        self.instance_id = join_id(self._id, lease)
        self._connection = connection
        self._generation = generation
        self._modality = request.task.modality
        self._region: str | None = body.get("heartbeat_region")
        self._runner = f"{root}api/v1/env"
        self._page = page_url(body)
        self._page_shown = lease is None
        self._tools = connection.make_tools(
            tool_endpoints(root, self._modality, lease), self._state.env, request
        )
        self._ended: str | None = None
        self._unconfirmed = _UnconfirmedRun()

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        until = loop_time() + timeout_s
        async with self._translating_failures(timeout_s):
            tools = await self._tools.list_tools(timeout_s)
            if not self._page_shown:
                await self._show_page(seconds_left(until))
        return tools

    async def get_first_observation(self, *, timeout_s: float) -> Sequence[Part]:
        if self._modality not in SCREEN_MODALITIES:
            return ()
        result = await self.call_tool(COMPUTER, SCREENSHOT, timeout_s=timeout_s)
        return await parse_screenshot(result, in_browser=self._modality == "browser_use")

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        async with self._translating_failures(timeout_s):
            return await self._tools.call_tool(name, arguments, timeout_s)

    async def grade_submission(
        self, submission: Submission, *, timeout_s: float
    ) -> Execution | None:
        verifier = self._connection.verifier
        if verifier is None or submission.task.verifier is None:
            return None
        self._require_running()
        until = loop_time() + timeout_s
        execution = self._unconfirmed.for_submission(submission)
        if execution is None:
            execution = await self._run_verifier(verifier, submission, until)
        if execution.error is None and execution.result:
            return execution
        # A verifier may take the silence of an ended instance for a failed task: a zero counts
        # only if the instance is known to run.
        self._unconfirmed = _UnconfirmedRun(submission, execution)
        await self._update_end_reason(until)
        self._unconfirmed = _UnconfirmedRun()
        if self._ended is not None:
            return Execution(error=self._ended, stdout=execution.stdout, instance_lost=True)
        return execution

    async def query_database(
        self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float
    ) -> Rows:
        url = fleet_wire.query_url(self._runner, db)
        body = fleet_wire.query_body(sql, list(args))
        try:
            async with self._translating_failures(timeout_s):
                answer = await self._connection.api.call_runner(
                    "POST", url, timeout_s=timeout_s, body=body
                )
        except FleetError as error:
            if error.status != 404 or db in _DATABASES:
                raise
            raise QueryError(f"no database {db!r}: {error}") from error
        return fleet_wire.parse_rows(answer)

    async def snapshot_database(self, db: str, *, timeout_s: float) -> bytes | None:
        query = lambda name, sql: self.query_database(name, sql, (), timeout_s=timeout_s)  # noqa: E731
        return await self._connection.snapshots.get_snapshot(db, self._state, query)

    async def is_alive(self, *, timeout_s: float) -> bool:
        # After a verifier at Fleet the same question follows its run.
        if self._connection.verifier is None:
            await self._update_end_reason(loop_time() + timeout_s)
        return self._ended is None

    async def close(self, *, timeout_s: float) -> None:
        self._connection.heartbeats.forget_instance(self.instance_id)
        await self._tools.close()
        if self._generation == self._connection.address.generation:
            await self._connection.delete_instance(self.instance_id, timeout_s)

    @property
    def end_reason(self) -> str | None:
        return self._ended

    async def send_heartbeat(self, timeout_s: float) -> None:
        """Send a heartbeat for the instance. Raises BackendError, `lost` if it has ended."""
        self._require_running()
        try:
            await self._connection.api.send_heartbeat(self._id, self._region, timeout_s=timeout_s)
        except FleetError as error:
            # Neither a fault of the server nor a rate limit.
            refused = error.status < 500 and error.kind != "throttled"
            if refused and await self._is_known_ended(loop_time() + _CHECK_S):
                self._require_running()
            raise

    def mark_ended(self, why: str) -> None:
        self._ended = self._ended or why

    async def _show_page(self, timeout_s: float) -> None:
        result = await self._tools.call_tool(COMPUTER, navigate_action(self._page), timeout_s)
        check_page_opened(self._page, result)
        self._page_shown = True

    @asynccontextmanager
    async def _translating_failures(self, timeout_s: float) -> AsyncGenerator[None]:
        """Distinguish an ended instance from one that only fails."""
        self._require_running()
        until = loop_time() + timeout_s
        try:
            yield
        except BackendError as error:
            if _may_have_ended(error) and await self._is_known_ended(until):
                self._require_running()
            if isinstance(error, HttpError):
                raise classify_error(error) from error
            if not error.lost:
                raise
            # A session reports a 404 as lost, but a proxy also answers 404 for a stopped server.
            raise BackendError("not_found", str(error), delivered=False) from error

    async def _run_verifier(
        self, verifier: FleetVerifier, submission: Submission, until: float
    ) -> Execution:
        try:
            return await verifier.run_verifier(self._id, submission, seconds_left(until))
        except BackendError as error:
            if error.kind != "throttled" and await self._is_known_ended(until):
                self._require_running()
            raise

    async def _is_known_ended(self, until: float) -> bool:
        """Return True if the instance is certain to have ended."""
        with suppress(BackendError):
            await self._update_end_reason(until)
        return self._ended is not None

    async def _update_end_reason(self, until: float) -> None:
        """Check whether the instance has ended. Raises BackendError if that is unknown."""
        if self._ended is None:
            left_s = min(_CHECK_S, until - loop_time())
            self._ended = await self._connection.find_end_reason(
                self.instance_id, max(0.001, left_s)
            )

    def _require_running(self) -> None:
        """Raise BackendError if the instance has ended, as not delivered: any effect of a call is
        gone with the instance."""
        if self._generation != self._connection.address.generation:
            self._ended = "the emulator was restarted, without this instance"
        if self._ended is not None:
            raise BackendError("lost", self._ended, delivered=False, lost=True)


def _may_have_ended(error: BackendError) -> bool:
    if isinstance(error, HttpError | FleetError):
        return error.status in _MAYBE_ENDED
    return error.lost or error.kind in ("connect", "connection")
