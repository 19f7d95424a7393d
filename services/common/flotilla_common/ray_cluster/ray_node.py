"""One Ray node on this machine, as a child of this process."""

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from flotilla_common.process.extras import install_command
from flotilla_common.process.line_channel import ChildLostError, LineChannel
from flotilla_common.process.python_command import python_command
from flotilla_common.ray_cluster.cluster_settings import (
    HUB_TOKEN,
    OBJECT_STORE_BYTES,
    derive_cluster_token,
)
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import join_host_port

_SUPERVISOR = "flotilla_common.ray_cluster.node_supervisor"
_START_SECONDS = 90.0
_CLOSE_SECONDS = 15.0
_FREE_SECONDS = 20.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node of the cluster whose head is at `head_host` and `port`.

    It offers `resources` besides its GPUs. Without `own_host` it is the head itself.
    """

    head_host: str
    port: int
    own_host: str | None = None
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_arguments(self) -> list[str]:
        """Return the arguments of `ray start`."""
        if self.own_host is None:
            # Ray Client cannot be disabled, and heads on one machine must not share its port.
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


def check_ray_is_installed(wanted_by: str) -> None:
    """Raise ConfigError if Ray, which the key `wanted_by` needs, is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(f"{wanted_by}: Ray is not installed; {install_command('ray')}")


class RayNode:
    """A running node, which ends with this process."""

    def __init__(self, child: LineChannel) -> None:
        self._child = child

    @staticmethod
    async def start_node(
        plan: NodePlan, token: str, log_path: Path, environment: Mapping[str, str] | None = None
    ) -> "RayNode":
        """Start a node with the run's token, and wait until it runs.

        Its processes also get `environment`. Raises ChildLostError."""
        if plan.own_host is None:
            await _wait_until_free(plan.port)
        child = await LineChannel.start_child(
            *("the Ray node", python_command("-m", _SUPERVISOR), log_path, HUB_TOKEN),
            more=environment,
        )
        node = RayNode(child)
        request = {"arguments": plan.to_arguments(), "token": derive_cluster_token(token)}
        try:
            await child.ask(request, _START_SECONDS)
        except BaseException:
            await node.close()
            raise
        return node

    @property
    def has_ended(self) -> bool:
        """True when the node is gone."""
        return self._child.exit_code is not None

    async def wait_until_ended(self) -> None:
        """Wait until the node ends on its own, for example because its head has ended."""
        await self._child.wait_until_lost()

    async def close(self) -> None:
        """End the node and all its processes. Idempotent."""
        if not self.has_ended:
            self._child.send("close")
        await self._child.close(_CLOSE_SECONDS)


async def _wait_until_free(port: int) -> None:
    """Wait while the head of a killed service still holds the port. Raises ChildLostError."""
    deadline = time.monotonic() + _FREE_SECONDS
    while True:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ChildLostError(f"port {port} is taken: {error}") from error
        else:
            return
        await asyncio.sleep(_LOOK_SECONDS)


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
