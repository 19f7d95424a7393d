"""OpenEnv servers as environments: an instance is one session, over one WebSocket.

The package itself is not imported: its client alone brings 160 MB and three seconds.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from services.common.large_values import aside_of
from services.env_gateway.adapters.http_client import http_session, send
from services.env_gateway.adapters.openenv import codec
from services.env_gateway.adapters.openenv.wire import Channel, Refusal, connect
from services.env_gateway.adapters.server_address import connect as connect_server
from services.env_gateway.adapters.supervised_server import Address
from services.env_gateway.config.backends import OpenEnvConfig
from services.env_gateway.episodes.task_format import Task
from services.env_gateway.ports import (
    BackendError,
    CallResult,
    Execution,
    Orphan,
    Part,
    Provision,
    QueryError,
    Report,
    Rows,
    SqlValue,
    Submission,
    Text,
    Tool,
)

_FAILURES_KEPT = 1024


def build(config: OpenEnvConfig, *, max_calls: int) -> "OpenEnvBackend":
    """Raises ConfigError when the API key is not in the environment."""
    address, headers = connect_server(config, where="env_gateway.backends.openenv")
    # Every episode holds a connection, whether or not it calls: `max_calls` does not bound them.
    http = http_session(max_connections=0, headers=headers)
    return OpenEnvBackend(config, address, http)


class OpenEnvInstance:
    """A session that was reset to its task."""

    env_version = ""

    def __init__(
        self,
        backend: "OpenEnvBackend",
        config: OpenEnvConfig,
        channel: Channel,
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
        self._rewards = [reward] if (reward := codec.reward_of(start)) is not None else []
        self._done = start.get("done") is True
        self._stdout = ""
        self._report: Report | None = None

    @property
    def ended(self) -> str | None:
        """An environment that is done may well close the session: its rewards are known."""
        over = self._done or self._channel.open
        return None if over else "the session ended before its episode"

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        """The tool that ends the episode is not offered: grading calls it."""
        if self._tools:
            return self._tools
        if not self._calls_tools:
            await self._channel.request("state", None, timeout_s=timeout_s)
            self._tools = [await aside_of(self._action, self._step_tool)]
            return self._tools
        data = await self._channel.request("step", {"type": "list_tools"}, timeout_s=timeout_s)
        read_only = self._config.read_only_tools
        tools = await aside_of(data, lambda: codec.listed_tools(data, read_only))
        self._tools = [tool for tool in tools if tool.name != self._config.submit_tool]
        self._submits = len(self._tools) < len(tools)
        return self._tools

    async def observe(self, *, timeout_s: float) -> Sequence[Part]:
        fields, images = self._config.first_observation, self._config.image_fields
        return await aside_of(self._start, lambda: codec.observed(self._start, fields, images))

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        try:
            data = await self._step(self._action_of(name, arguments), timeout_s)
        except Refusal as refusal:
            return self._refused(refusal)
        return await aside_of(data, lambda: codec.call_result(data, self._config.image_fields))

    async def query(self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float) -> Rows:
        raise QueryError("an OpenEnv server shows no database; it grades by its rewards")

    async def snapshot(self, db: str, *, timeout_s: float) -> bytes | None:
        return None

    async def grade(self, submission: Submission, *, timeout_s: float) -> Execution | None:
        """The environment's rewards are the grade, and the task's own verifier is not run."""
        if self._config.reward == "verifier":
            return None
        if self._submits and not self._done:
            try:
                await self._submit(submission.final_answer, timeout_s)
            except BackendError as error:
                if error.refused:
                    raise
                lost, timed_out = error.lost, error.kind == "timeout"
                return Execution(error=str(error), instance_lost=lost, timed_out=timed_out)
        if self.ended is not None:
            return Execution(error=self.ended, instance_lost=True)
        if not self._rewards:
            return Execution(error="the environment gave no reward")
        total = self._rewards[-1] if self._config.reward == "last" else sum(self._rewards)
        return Execution(result=total, report=self._report, stdout=self._stdout)

    async def close(self, *, timeout_s: float) -> None:
        await self._channel.close(timeout_s=timeout_s)
        self._backend.forget(self.instance_id, self._channel)

    def _step_tool(self) -> Tool:
        return codec.step_tool(self._config.step_tool, self._action)

    async def _submit(self, final_answer: str | None, timeout_s: float) -> None:
        tool = self._config.submit_tool
        arguments = {self._config.submit_argument: final_answer}
        data = await self._step(self._action_of(tool, arguments), timeout_s)
        self._stdout, self._report = codec.printed(data), codec.report(data)
        result = await aside_of(data, lambda: codec.call_result(data, ()))
        if result.is_error:
            shown = "; ".join(part.text for part in result.parts if isinstance(part, Text))
            raise BackendError("refused", f"{tool} failed: {shown}", delivered=True)

    async def _step(self, action: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        data = await self._channel.request("step", action, timeout_s=timeout_s)
        if (reward := codec.reward_of(data)) is not None:
            self._rewards.append(reward)
        self._done = self._done or data.get("done") is True
        return data

    def _action_of(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._calls_tools:
            return arguments
        return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}

    def _refused(self, refusal: Refusal) -> CallResult:
        if refusal.code == "EXECUTION_ERROR" or (
            # A tool call is well formed: what failed to validate is something of the tool's own.
            refusal.code == "VALIDATION_ERROR" and self._calls_tools
        ):
            return CallResult((Text(refusal.message),), is_error=True)
        refusal.bad_arguments = refusal.code == "VALIDATION_ERROR"
        raise refusal


class OpenEnvBackend:
    """Sessions end with their sockets, so that a restart finds none to reclaim; a server frees
    those of a host that vanished by its own `session_timeout`."""

    apart = False

    def __init__(
        self, config: OpenEnvConfig, address: Address, http: aiohttp.ClientSession
    ) -> None:
        self._config = config
        self._address = address
        self._http = http
        self._actions: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._failures: OrderedDict[str, str] = OrderedDict()
        self.channels: dict[str, Channel] = {}

    def serves(self, env_key: str) -> bool:
        return True

    async def provision(self, request: Provision, *, timeout_s: float) -> OpenEnvInstance:
        config, task = self._config, request.task
        until = _now() + timeout_s
        url = _http(await self._address.url(timeout_s) + config.path)
        url = url.replace("{env_key}", task.env_key)
        action = await self._action_schema(url, until - _now())
        channel = await connect(
            self._http,
            url,
            timeout_s=until - _now(),
            ping_interval_s=config.ping_interval_s,
            limits=config.answers,
        )
        try:
            start = await self._reset(channel, request, until - _now())
        except BaseException:
            channel.drop("it was not reset")
            raise
        instance_id = f"openenv-{request.episode_id}"
        self._keep(instance_id, channel)
        return OpenEnvInstance(self, config, channel, task, action, start, instance_id)

    async def reclaim(self, orphan: Orphan, *, timeout_s: float) -> None:
        """A session of a process that has ended has ended too."""

    def forget(self, instance_id: str, channel: Channel) -> None:
        if self.channels.get(instance_id) is channel:
            del self.channels[instance_id]

    async def close(self) -> None:
        for channel in self.channels.values():
            channel.drop("the gateway ends")
        await self._http.close()
        await self._address.close()

    def _keep(self, instance_id: str, channel: Channel) -> None:
        earlier = self.channels.pop(instance_id, None)
        if earlier is not None:
            earlier.drop("the same episode was opened again")
        self.channels[instance_id] = channel

    async def _action_schema(self, url: str, timeout_s: float) -> Mapping[str, Any]:
        """What an action looks like; asked for once of each start of a server."""
        if self._config.actions == "tools":
            return {}
        generation = self._address.generation
        known = self._actions.get(url)
        if known is None or known[0] != generation:
            schema, _ = await send(
                self._http,
                "GET",
                f"{url}/schema",
                timeout_s=timeout_s,
                limits=self._config.answers,
            )
            if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
                message = f"{url}/schema does not say what an action is"
                raise BackendError("protocol", message, delivered=False)
            known = self._actions[url] = (generation, schema["action"])
        return known[1]

    async def _reset(
        self, channel: Channel, request: Provision, timeout_s: float
    ) -> Mapping[str, Any]:
        episode_id = request.episode_id
        data = {
            name: value
            for name, field in self._config.task_fields.items()
            if (value := _field(request, field)) not in ("", None)
        }
        try:
            start = await channel.request("reset", data, timeout_s=timeout_s)
        except Refusal as refusal:
            if refusal.code == "EXECUTION_ERROR":
                # The same words twice: what it refuses is the task, and not a passing trouble.
                refusal.invalid = self._failures.get(episode_id) == refusal.message
                self._failures[episode_id] = refusal.message
                if len(self._failures) > _FAILURES_KEPT:
                    self._failures.popitem(last=False)
            raise
        self._failures.pop(episode_id, None)
        return start


def _field(request: Provision, field: str) -> Any:
    task = request.task
    name, _, variable = field.partition(".")
    if name == "env_variables":
        return task.raw_variables.get(variable) if variable else dict(task.raw_variables)
    if name == "seed":
        # The same for all attempts at a task, which are to start alike.
        return int.from_bytes(hashlib.sha256(task.key.encode()).digest()[:4]) >> 1
    return request.episode_id if name == "episode_id" else getattr(task, name)


def _http(url: str) -> str:
    return f"http{url.removeprefix('ws')}" if url.startswith("ws") else url


def _now() -> float:
    return asyncio.get_running_loop().time()
