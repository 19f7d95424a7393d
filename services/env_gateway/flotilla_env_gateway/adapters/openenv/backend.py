"""OpenEnv servers as environments: an instance is one session, over one WebSocket.

The package itself is not imported: its client alone costs 160 MB and three seconds.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import aiohttp

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.rpc.deadlines import loop_time
from flotilla_env_gateway.adapters.http_client import exchange_json, open_http_session
from flotilla_env_gateway.adapters.openenv.instance import OpenEnvInstance
from flotilla_env_gateway.adapters.openenv.wire import OpenEnvChannel, OpenEnvError, open_channel
from flotilla_env_gateway.adapters.server_address import connect_server as connect_server
from flotilla_env_gateway.adapters.supervised_server import ServerAddress
from flotilla_env_gateway.config.openenv import OpenEnvConfig
from flotilla_env_gateway.ports import Backend, BackendError, ProvisionRequest

_FAILURES_KEPT = 1024


def build_openenv_backend(config: OpenEnvConfig, *, max_calls: int) -> "OpenEnvBackend":
    """Build the backend of an OpenEnv server. Raises ConfigError if the API key is not in the
    environment."""
    address, headers = connect_server(config, where="env_gateway.backends.openenv")
    # Every episode holds a connection, even without calls: `max_calls` does not bound them.
    http = open_http_session(max_connections=0, headers=headers)
    return OpenEnvBackend(config, address, http)


class OpenEnvBackend(Backend):
    """OpenEnv servers as a backend. Sessions end with their sockets, so a restart finds none to
    reclaim; a server frees those of a vanished host after its own `session_timeout`."""

    def __init__(
        self, config: OpenEnvConfig, address: ServerAddress, http: aiohttp.ClientSession
    ) -> None:
        self._config = config
        self._address = address
        self._http = http
        self._actions: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._failures: BoundedDict[str, str] = BoundedDict(_FAILURES_KEPT)
        self.channels: dict[str, OpenEnvChannel] = {}

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> OpenEnvInstance:
        config, task = self._config, request.task
        until = loop_time() + timeout_s
        url = _to_http_url(await self._address.wait_for_root(timeout_s) + config.path)
        url = url.replace("{env_key}", task.env_key)
        action = await self._action_schema(url, until - loop_time())
        channel = await open_channel(
            self._http,
            url,
            timeout_s=until - loop_time(),
            ping_interval_s=config.ping_interval_s,
            limits=config.answer_limits,
        )
        try:
            start = await self._reset_session(channel, request, until - loop_time())
        except BaseException:
            channel.drop_session("it was not reset")
            raise
        instance_id = f"openenv-{request.episode_id}"
        self._keep_channel(instance_id, channel)
        return OpenEnvInstance(
            self.forget_channel, config, channel, task, action, start, instance_id
        )

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
        """Return the schema of an action, fetched once per start of a server."""
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
                message = f"{url}/schema does not describe an action"
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
                # The same error twice: the task is refused, this is not a transient fault.
                refusal.invalid = self._failures.get(episode_id) == refusal.message
                self._failures[episode_id] = refusal.message
            raise
        self._failures.pop(episode_id, None)
        return start


def _read_field(request: ProvisionRequest, field: str) -> Any:
    task = request.task
    name, _, variable = field.partition(".")
    if name == "env_variables":
        return task.raw_variables.get(variable) if variable else dict(task.raw_variables)
    if name == "seed":
        # The same for all attempts at a task, so that they start alike.
        return int.from_bytes(hashlib.sha256(task.key.encode()).digest()[:4]) >> 1
    return request.episode_id if name == "episode_id" else getattr(task, name)


def _to_http_url(url: str) -> str:
    return f"http{url.removeprefix('ws')}" if url.startswith("ws") else url
