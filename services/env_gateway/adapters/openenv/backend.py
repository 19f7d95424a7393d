"""OpenEnv servers as environments: an instance is one session, over one WebSocket.

The package itself is not imported: its client alone brings 160 MB and three seconds.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from services.common.large_values import run_aside_for
from services.env_gateway.adapters.http_client import exchange_json, open_http_session
from services.env_gateway.adapters.openenv import codec
from services.env_gateway.adapters.openenv.wire import OpenEnvChannel, OpenEnvError, open_channel
from services.env_gateway.adapters.server_address import connect_server as connect_server
from services.env_gateway.adapters.supervised_server import ServerAddress
from services.env_gateway.config.backends import OpenEnvConfig
from services.env_gateway.ports import (
    BackendError,
    CallResult,
    CheckReport,
    Execution,
    Orphan,
    Part,
    ProvisionRequest,
    QueryError,
    Rows,
    SqlValue,
    Submission,
    Text,
    Tool,
)
from services.env_gateway.tasks.task_format import Task

_FAILURES_KEPT = 1024


def build_openenv_backend(config: OpenEnvConfig, *, max_calls: int) -> "OpenEnvBackend":
    """Build the backend of an OpenEnv server. Raises ConfigError when the API key is not in the
    environment."""
    address, headers = connect_server(config, where="env_gateway.backends.openenv")
    # Every episode holds a connection, whether or not it calls: `max_calls` does not bound them.
    http = open_http_session(max_connections=0, headers=headers)
    return OpenEnvBackend(config, address, http)


class OpenEnvInstance:
    """A session that was reset to its task."""

    env_version = ""

    def __init__(
        self,
        backend: "OpenEnvBackend",
        config: OpenEnvConfig,
        channel: OpenEnvChannel,
        task: Task,
        action: Mapping[str, Any],
        start: Mapping[str, Any],
        instance_id: str,
    ) -> None:
        self.instance_id = instance_id
        self.data_version = task.data_version
        self._backend = backend
        self._config = config
        self._channel = channel
        self._start = start
        self._action = action
        self._calls_tools = config.actions == "tools" or (
            config.actions == "auto" and codec.takes_tool_calls(action)
        )
        self._tools: Sequence[Tool] = ()
        self._submits = False
        self._rewards = [reward] if (reward := codec.parse_reward(start)) is not None else []
        self._done = start.get("done") is True
        self._stdout = ""
        self._report: CheckReport | None = None

    @property
    def end_reason(self) -> str | None:
        """The reason why the session ended before its episode. An environment that is done may
        well close the session: its rewards are known."""
        over = self._done or self._channel.is_open
        return None if over else "the session ended before its episode"

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        """List the tools but the one that ends the episode, which grading calls."""
        if self._tools:
            return self._tools
        if not self._calls_tools:
            await self._channel.send_request("state", None, timeout_s=timeout_s)
            self._tools = [await run_aside_for(self._action, self._step_tool)]
            return self._tools
        data = await self._channel.send_request("step", {"type": "list_tools"}, timeout_s=timeout_s)
        read_only = self._config.read_only_tools
        tools = await run_aside_for(data, lambda: codec.parse_tools(data, read_only))
        self._tools = [tool for tool in tools if tool.name != self._config.submit_tool]
        self._submits = len(self._tools) < len(tools)
        return self._tools

    async def get_first_observation(self, *, timeout_s: float) -> Sequence[Part]:
        fields, images = self._config.first_observation, self._config.image_fields
        return await run_aside_for(
            self._start, lambda: codec.parse_observation(self._start, fields, images)
        )

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        try:
            data = await self._send_step(self._make_action(name, arguments), timeout_s)
        except OpenEnvError as refusal:
            return self._handle_refusal(refusal)
        return await run_aside_for(
            data, lambda: codec.parse_call_result(data, self._config.image_fields)
        )

    async def query_database(
        self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float
    ) -> Rows:
        raise QueryError("an OpenEnv server shows no database; it grades by its rewards")

    async def snapshot_database(self, db: str, *, timeout_s: float) -> bytes | None:
        return None

    async def grade_submission(
        self, submission: Submission, *, timeout_s: float
    ) -> Execution | None:
        """Grade by the environment's rewards; the task's own verifier is not run."""
        if self._config.reward == "verifier":
            return None
        if self._submits and not self._done:
            try:
                await self._submit_answer(submission.final_answer, timeout_s)
            except BackendError as error:
                if error.is_refusal:
                    raise
                lost, timed_out = error.lost, error.kind == "timeout"
                return Execution(error=str(error), instance_lost=lost, timed_out=timed_out)
        if self.end_reason is not None:
            return Execution(error=self.end_reason, instance_lost=True)
        if not self._rewards:
            return Execution(error="the environment gave no reward")
        total = self._rewards[-1] if self._config.reward == "last" else sum(self._rewards)
        return Execution(result=total, report=self._report, stdout=self._stdout)

    async def close(self, *, timeout_s: float) -> None:
        await self._channel.close(timeout_s=timeout_s)
        self._backend.forget_channel(self.instance_id, self._channel)

    def _step_tool(self) -> Tool:
        return codec.make_step_tool(self._config.step_tool, self._action)

    async def _submit_answer(self, final_answer: str | None, timeout_s: float) -> None:
        tool = self._config.submit_tool
        arguments = {self._config.submit_argument: final_answer}
        data = await self._send_step(self._make_action(tool, arguments), timeout_s)
        self._stdout, self._report = codec.parse_stdout(data), codec.parse_report(data)
        result = await run_aside_for(data, lambda: codec.parse_call_result(data, ()))
        if result.is_error:
            shown = "; ".join(part.text for part in result.parts if isinstance(part, Text))
            raise BackendError("refused", f"{tool} failed: {shown}", delivered=True)

    async def _send_step(self, action: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        data = await self._channel.send_request("step", action, timeout_s=timeout_s)
        if (reward := codec.parse_reward(data)) is not None:
            self._rewards.append(reward)
        self._done = self._done or data.get("done") is True
        return data

    def _make_action(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._calls_tools:
            return arguments
        return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}

    def _handle_refusal(self, refusal: OpenEnvError) -> CallResult:
        if refusal.code == "EXECUTION_ERROR" or (
            # A tool call is well formed: what failed to validate is something of the tool's own.
            refusal.code == "VALIDATION_ERROR" and self._calls_tools
        ):
            return CallResult((Text(refusal.message),), is_error=True)
        refusal.bad_arguments = refusal.code == "VALIDATION_ERROR"
        raise refusal


class OpenEnvBackend:
    """OpenEnv servers as a backend. Sessions end with their sockets, so that a restart finds none
    to reclaim; a server frees those of a host that vanished by its own `session_timeout`."""

    isolates_instances = False

    def __init__(
        self, config: OpenEnvConfig, address: ServerAddress, http: aiohttp.ClientSession
    ) -> None:
        self._config = config
        self._address = address
        self._http = http
        self._actions: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._failures: OrderedDict[str, str] = OrderedDict()
        self.channels: dict[str, OpenEnvChannel] = {}

    def serves_environment(self, env_key: str) -> bool:
        return True

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> OpenEnvInstance:
        config, task = self._config, request.task
        until = _now() + timeout_s
        url = _to_http_url(await self._address.wait_for_url(timeout_s) + config.path)
        url = url.replace("{env_key}", task.env_key)
        action = await self._action_schema(url, until - _now())
        channel = await open_channel(
            self._http,
            url,
            timeout_s=until - _now(),
            ping_interval_s=config.ping_interval_s,
            limits=config.answer_limits,
        )
        try:
            start = await self._reset_session(channel, request, until - _now())
        except BaseException:
            channel.drop_session("it was not reset")
            raise
        instance_id = f"openenv-{request.episode_id}"
        self._keep_channel(instance_id, channel)
        return OpenEnvInstance(self, config, channel, task, action, start, instance_id)

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        """Do nothing: a session of a process that has ended has ended too."""

    def forget_channel(self, instance_id: str, channel: OpenEnvChannel) -> None:
        if self.channels.get(instance_id) is channel:
            del self.channels[instance_id]

    async def close(self) -> None:
        for channel in self.channels.values():
            channel.drop_session("the gateway ends")
        await self._http.close()
        await self._address.close()

    def _keep_channel(self, instance_id: str, channel: OpenEnvChannel) -> None:
        earlier = self.channels.pop(instance_id, None)
        if earlier is not None:
            earlier.drop_session("the same episode was opened again")
        self.channels[instance_id] = channel

    async def _action_schema(self, url: str, timeout_s: float) -> Mapping[str, Any]:
        """Return the schema of an action, fetched once for each start of a server."""
        if self._config.actions == "tools":
            return {}
        generation = self._address.generation
        known = self._actions.get(url)
        if known is None or known[0] != generation:
            schema, _ = await exchange_json(
                self._http,
                "GET",
                f"{url}/schema",
                timeout_s=timeout_s,
                limits=self._config.answer_limits,
            )
            if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
                message = f"{url}/schema does not say what an action is"
                raise BackendError("protocol", message, delivered=False)
            known = self._actions[url] = (generation, schema["action"])
        return known[1]

    async def _reset_session(
        self, channel: OpenEnvChannel, request: ProvisionRequest, timeout_s: float
    ) -> Mapping[str, Any]:
        episode_id = request.episode_id
        data = {
            name: value
            for name, field in self._config.task_fields.items()
            if (value := _read_field(request, field)) not in ("", None)
        }
        try:
            start = await channel.send_request("reset", data, timeout_s=timeout_s)
        except OpenEnvError as refusal:
            if refusal.code == "EXECUTION_ERROR":
                # The same words twice: what it refuses is the task, and not a passing trouble.
                refusal.invalid = self._failures.get(episode_id) == refusal.message
                self._failures[episode_id] = refusal.message
                if len(self._failures) > _FAILURES_KEPT:
                    self._failures.popitem(last=False)
            raise
        self._failures.pop(episode_id, None)
        return start


def _read_field(request: ProvisionRequest, field: str) -> Any:
    task = request.task
    name, _, variable = field.partition(".")
    if name == "env_variables":
        return task.raw_variables.get(variable) if variable else dict(task.raw_variables)
    if name == "seed":
        # The same for all attempts at a task, which are to start alike.
        return int.from_bytes(hashlib.sha256(task.key.encode()).digest()[:4]) >> 1
    return request.episode_id if name == "episode_id" else getattr(task, name)


def _to_http_url(url: str) -> str:
    return f"http{url.removeprefix('ws')}" if url.startswith("ws") else url


def _now() -> float:
    return asyncio.get_running_loop().time()
