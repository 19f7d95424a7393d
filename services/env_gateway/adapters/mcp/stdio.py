"""MCP servers that speak over their standard input and output: one process per episode."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from services.common.large_values import dump_json_aside, run_aside_for
from services.common.parsing import ParseError, TextLimits, TooLargeError, parse_json_aside
from services.env_gateway.adapters.http_client import DEFAULT_LIMITS
from services.env_gateway.adapters.mcp.wire import (
    INITIALIZE,
    INITIALIZED,
    parse_call_result,
    parse_result,
    parse_tools,
)
from services.env_gateway.adapters.server_address import configured_environment
from services.env_gateway.adapters.supervised_server import (
    StderrTail,
    end_process_group,
    spawn_process,
)
from services.env_gateway.config.backends import McpConfig
from services.env_gateway.ports import (
    BackendError,
    CallResult,
    Execution,
    Orphan,
    Part,
    ProvisionRequest,
    QueryError,
    Rows,
    SqlValue,
    Submission,
    Tool,
)
from services.env_gateway.tasks.task_format import Task

_ENDED_S = 2.0


class StdioServer:
    """One server process and its pending requests. Answers are matched by their ids."""

    def __init__(
        self, process: asyncio.subprocess.Process, limits: TextLimits = DEFAULT_LIMITS
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self.ended = ""
        self._limits = limits
        self._words = StderrTail(process)
        self._reading = asyncio.create_task(self._read_messages())

    async def send_request(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        """Send a request and return its result. Raises BackendError; the server is notified when
        an answer is no longer awaited."""
        self._require_running()
        self._next_id += 1
        number = self._next_id
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        try:
            async with asyncio.timeout(timeout_s):
                await self._write_message(message)
                return parse_result(await answer, method)
        except TimeoutError:
            await self._cancel_request(number)
            message = f"no answer to {method} within {timeout_s:.1f} s"
            raise BackendError("timeout", message, delivered=None) from None
        finally:
            self._waiting.pop(number, None)

    async def send_notification(self, message: Mapping[str, Any]) -> None:
        self._require_running()
        await self._write_message(message)

    async def close(self) -> None:
        self._reading.cancel()
        # Whatever it ended with, the process must end too.
        await asyncio.wait({self._reading})
        await end_process_group(self.process)
        await self._words.close()

    def _require_running(self) -> None:
        if self.ended:
            raise _lost_error(self.ended, delivered=False)

    async def _write_message(self, message: Mapping[str, Any]) -> None:
        try:
            self._stdin.write(await dump_json_aside(message) + b"\n")
            await self._stdin.drain()
        except ConnectionError as error:
            # Who reads its output knows how it ended, in a moment.
            await asyncio.wait({self._reading}, timeout=_ENDED_S)
            raise _lost_error(self.ended or str(error), delivered=None) from error

    async def _cancel_request(self, number: int) -> None:
        params = {"requestId": number, "reason": "timeout"}
        # A server that does not even read is not waited for.
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(0.1):
                await self._write_message(
                    {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
                )

    async def _read_messages(self) -> None:
        why = "its output is read no more"
        try:
            while line := await self._stdout.readline():
                await self._deliver_response(line)
            why = await self._words.describe_end()
        except TooLargeError as error:
            why = f"it wrote a line that is too large: {error} (max_answer_values)"
        except ValueError:
            why = f"it wrote a line of more than {self._limits.bytes} bytes (max_answer_bytes)"
        finally:
            self.ended = why
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(_lost_error(why, delivered=None))

    async def _deliver_response(self, line: bytes) -> None:
        """Deliver a response to its request; all other messages of the server are passed over.
        Raises TooLargeError, for it is unknown whose answer that was."""
        try:
            message = await parse_json_aside(line, self._limits)
        except TooLargeError:
            raise
        except ParseError:
            return
        if not isinstance(message, dict) or "method" in message:
            return
        number = message.get("id")
        answer = self._waiting.get(number) if isinstance(number, int) else None
        if answer is not None and not answer.done():
            answer.set_result(message)


class StdioInstance:
    """A server process of one episode."""

    data_version = ""

    def __init__(
        self, backend: "McpStdioBackend", request: ProvisionRequest, server: StdioServer
    ) -> None:
        self.instance_id = f"stdio-{request.episode_id}"
        self.env_version = request.task.env_version
        self._backend = backend
        self._server = server
        self._initialized = False

    @property
    def end_reason(self) -> str | None:
        return self._server.ended or None

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        until = _now() + timeout_s
        if not self._initialized:
            await self._server.send_request("initialize", INITIALIZE, timeout_s)
            await self._server.send_notification(INITIALIZED)
            self._initialized = True
        return [self._backend.apply_read_only(tool) for tool in await self._fetch_tools(until)]

    async def get_first_observation(self, *, timeout_s: float) -> Sequence[Part]:
        return ()

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        params = {"name": name, "arguments": arguments}
        result = await self._server.send_request("tools/call", params, timeout_s)
        return await run_aside_for(result, lambda: parse_call_result(result))

    async def grade_submission(
        self, submission: Submission, *, timeout_s: float
    ) -> Execution | None:
        return None

    async def query_database(
        self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float
    ) -> Rows:
        raise QueryError("a plain MCP server shows no database")

    async def snapshot_database(self, db: str, *, timeout_s: float) -> bytes | None:
        return None

    async def close(self, *, timeout_s: float) -> None:
        self._backend.forget_instance(self.instance_id)
        await self._server.close()

    async def _fetch_tools(self, until: float) -> list[Tool]:
        tools: list[Tool] = []
        params: dict[str, Any] = {}
        while True:
            left_s = max(0.001, until - _now())
            result = await self._server.send_request("tools/list", params, left_s)
            tools += await run_aside_for(result, partial(parse_tools, result))
            if not (cursor := result.get("nextCursor")):
                return tools
            params = {"cursor": cursor}


class McpStdioBackend:
    """Backend that starts `command` once per episode; the processes end with the gateway, however
    it ends."""

    isolates_instances = True

    def __init__(self, config: McpConfig) -> None:
        assert config.command is not None, "checked by McpConfig"
        self._config = config
        self._command = config.command
        self._environment = configured_environment(config, where="env_gateway.backends.mcp")
        self._running: dict[str, StdioInstance] = {}

    def serves_environment(self, env_key: str) -> bool:
        return True

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> StdioInstance:
        known = self._running.get(f"stdio-{request.episode_id}")
        if known is not None:
            return known
        try:
            environment = {**self._environment, **_episode_environment(request.task)}
            limit = self._config.max_answer_bytes
            process = await spawn_process(self._command, environment, limit=limit)
        except OSError as error:
            message = f"{self._command[0]}: {error}"
            raise BackendError("not_started", message, delivered=False) from error
        instance = StdioInstance(self, request, StdioServer(process, self._config.answer_limits))
        self._running[instance.instance_id] = instance
        return instance

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        """Do nothing: a process of a gateway that has ended has ended too."""

    async def close(self) -> None:
        instances = list(self._running.values())
        await asyncio.gather(*(instance.close(timeout_s=1.0) for instance in instances))

    def forget_instance(self, instance_id: str) -> None:
        self._running.pop(instance_id, None)

    def apply_read_only(self, tool: Tool) -> Tool:
        return replace(tool, read_only=tool.read_only or tool.name in self._config.read_only_tools)


def _episode_environment(task: Task) -> dict[str, str]:
    """Build the environment variables by which a server knows its episode."""
    return {
        "FLOTILLA_TASK_KEY": task.key,
        "FLOTILLA_DATA_KEY": task.data_key,
        "FLOTILLA_DATA_VERSION": task.data_version,
        "FLOTILLA_ENV_VARIABLES": json.dumps(dict(task.raw_variables)),
    }


def _lost_error(why: str, *, delivered: bool | None) -> BackendError:
    return BackendError("lost", f"the MCP server is gone: {why}", delivered=delivered, lost=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
