"""One Ray node on this machine, as a child of this process."""

import asyncio
import json
import socket
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from services.common.child_environment import child_environment
from services.common.errors import ConfigError
from services.common.network_addresses import join_host_port
from services.common.python_command import python_command
from services.common.ray_cluster.cluster_settings import (
    HUB_TOKEN,
    OBJECT_STORE_BYTES,
    derive_cluster_token,
)

_SUPERVISOR = "services.common.ray_cluster.node_supervisor"
_START_SECONDS = 90.0
_CLOSE_SECONDS = 15.0
_FREE_SECONDS = 20.0
_LOOK_SECONDS = 0.2
_TAIL_BYTES = 2048


class RayNodeError(Exception):
    """The node did not start; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node of the cluster whose head is at `head_host` and `port`.

    `resources` are what it offers besides so many GPUs. Without `own_host` it is the head itself.
    """

    head_host: str
    port: int
    own_host: str | None = None
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_arguments(self) -> list[str]:
        """Return the arguments of `ray start`."""
        if self.own_host is None:
            # Ray Client cannot be switched off, and heads of one machine must not share its port.
            client = f"--ray-client-server-port={_free_port()}"
            where = ["--head", f"--port={self.port}", client, "--include-dashboard=false"]
        else:
            where = [f"--address={join_host_port(self.head_host, self.port)}"]
        return [
            *where,
            f"--node-ip-address={self.own_host or self.head_host}",
            "--num-cpus=0",
            f"--num-gpus={self.gpus}",
            f"--resources={json.dumps(dict(self.resources))}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--include-log-monitor=false",
            "--disable-usage-stats",
        ]


def read_tail(log_path: Path) -> str:
    """Return the end of a log, for a message."""
    text = log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
    return f"end of {log_path}:\n{text}"


def check_ray_is_installed(wanted_by: str) -> None:
    """Raise ConfigError where there is no Ray for what `wanted_by` sets."""
    if find_spec("ray") is None:
        raise ConfigError(f"{wanted_by}: there is no Ray here; pip install 'flotilla[ray]'")


class RayNode:
    """A node that runs, and ends with this process."""

    def __init__(self, process: Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path

    @staticmethod
    async def start_node(
        plan: NodePlan, token: str, log_path: Path, environment: Mapping[str, str] | None = None
    ) -> "RayNode":
        """Start a node with the run's token, and wait until it runs.

        What runs on it gets `environment` besides. Raises RayNodeError."""
        if plan.own_host is None:
            await _wait_until_free(plan.port)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *python_command("-m", _SUPERVISOR),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env={**child_environment(HUB_TOKEN, ours=True), **(environment or {})},
                start_new_session=True,
            )
        node = RayNode(process, log_path)
        assert process.stdin is not None
        said = {"arguments": plan.to_arguments(), "token": derive_cluster_token(token)}
        process.stdin.write(json.dumps(said).encode() + b"\n")
        try:
            await node._wait_until_started()
        except BaseException:
            await node.close()
            raise
        return node

    @property
    def has_ended(self) -> bool:
        """True when the node is gone."""
        return self._process.returncode is not None

    async def wait_until_ended(self) -> None:
        """Wait until the node ends by itself, as without its head."""
        await self._process.wait()

    async def close(self) -> None:
        """End the node and all that runs on it. May be called again."""
        assert self._process.stdin is not None
        if not self.has_ended:
            self._process.stdin.write(b"close\n")
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def log_tail(self) -> str:
        """Return the end of the node's log."""
        return read_tail(self._log_path)

    async def _wait_until_started(self) -> None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise RayNodeError(
                f"the Ray node has not started in {_START_SECONDS:.0f} s; {self.log_tail()}"
            ) from None
        if not line:
            code = await self._process.wait()
            raise RayNodeError(f"`ray start` ended with code {code}; {self.log_tail()}")


async def _wait_until_free(port: int) -> None:
    """Wait while the head of a service that was killed still ends. Raises RayNodeError."""
    deadline = time.monotonic() + _FREE_SECONDS
    while True:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RayNodeError(f"port {port} is taken: {error}") from error
        else:
            return
        await asyncio.sleep(_LOOK_SECONDS)


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
