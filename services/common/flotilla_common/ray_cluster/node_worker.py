"""Program of a further machine: a Ray node for one head after another."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flotilla_common.aio.concurrency import run_until_first
from flotilla_common.process.line_channel import ChildLostError
from flotilla_common.process.runtime import Runtime
from flotilla_common.ray_cluster.machine_resources import machine_offers
from flotilla_common.ray_cluster.node_folder import NodeFolder
from flotilla_common.ray_cluster.ray_node import (
    NodePlan,
    RayNode,
    check_ray_is_installed,
)
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_common.weights.network_interfaces import own_address
from flotilla_common.weights.shared_memory import private_folder, shared_name

_LOOK_S = 0.5
_DIAL_S = 2.0
_UNREACHED_S = 10.0
# Parts of the output of `ray start` when the head refuses it for good.
_REFUSALS = ("AuthenticationError", "ersion mismatch")
_log = get_logger(__name__)

# Returns the head's host; waits until it is known.
FindHead = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class MachineMembership:
    """Membership of machine `number` in a service whose head listens at `ray_port`, set by the
    spec's `port_key`.

    The machine offers `workers` processes and `gpus`; its processes get `environment` too."""

    service: str
    number: int
    ray_port: int
    port_key: str
    join_s: float
    workers: int
    gpus: int
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def check_machine(number: int, section: str, nodes: int) -> None:
    """Raise ConfigError if `--replica` is not one of a service's further machines, or Ray is not
    installed. `section` is the part of the spec that sets the number of its `nodes`."""
    service = section.partition(".")[0]
    if not 0 < number < nodes:
        raise ConfigError(
            f"--replica {number}: {section}.nodes is {nodes}, so further machines of the {service}"
            f" have the numbers 1 to {nodes - 1}; 0 runs `python -m flotilla_{service}` itself"
        )
    check_ray_is_installed(f"{section}.nodes = {nodes}")


async def serve_machine(
    runtime: Runtime[Any], member: MachineMembership, find_head: FindHead
) -> None:
    """Offer this machine until its service has ended, see `NodeWorker.run_until_over`."""
    run_name = shared_name(runtime.run_id, runtime.run_dir)
    with private_folder(f"{run_name}-{member.service}-node-{member.number}") as marks:
        folder = NodeFolder(marks, runtime.run_dir.absolute() / "logs")
        worker = NodeWorker(find_head, member, runtime.token, folder, runtime.drain)
        await worker.run_until_over()


class NodeWorker:
    """Keeper of a Ray node that stays with the service's head until the service ends in order."""

    def __init__(
        self,
        find_head: FindHead,
        member: MachineMembership,
        token: str,
        folder: NodeFolder,
        drain: asyncio.Event,
    ) -> None:
        """Plan a machine; `folder` is its private folder."""
        self._find_head = find_head
        self._member = member
        self._token = token
        self._folder = folder
        self._drain = drain
        self._why_away = ""

    async def run_until_over(self) -> None:
        """Return when the service has ended in order, or this machine may leave.

        Raises TimeoutError after `join_s` without a head, ConfigError if the head refuses it."""
        patience, service = self._member.join_s, self._member.service
        seen = time.monotonic()
        while not self._drain.is_set():
            if time.monotonic() - seen > patience:
                raise TimeoutError(
                    f"no {service} for {patience:g} s: see its log, and that --registry or --peer"
                    f" {service}=HOST:PORT and {self._member.port_key} are right{self._why_away}"
                )
            host = await self._reachable_head(patience)
            if host is not None and await self._serve_head(host):
                if self._folder.over.exists():
                    return
                seen = time.monotonic()
            await asyncio.sleep(_LOOK_S)

    async def _reachable_head(self, patience: float) -> str | None:
        try:
            async with asyncio.timeout(patience):
                host = await self._find_head()
            await self._dial_head(host)
        except (OSError, TimeoutError):
            return None
        return host

    async def _dial_head(self, host: str) -> None:
        async with asyncio.timeout(_DIAL_S):
            _, writer = await asyncio.open_connection(host, self._member.ray_port)
        writer.close()

    async def _wait_until_head_is_gone(self, host: str) -> None:
        """Return when nothing listens at the head's port any more, or its machine has long been
        unreachable; Ray takes longer to notice."""
        reached = time.monotonic()
        while time.monotonic() - reached < _UNREACHED_S:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._dial_head(host)
                reached = time.monotonic()
            except ConnectionRefusedError:
                return
            except (OSError, TimeoutError):
                continue

    async def _wait_until_dismissed(self) -> None:
        while True:
            if self._may_leave():
                return
            await asyncio.sleep(_LOOK_S)

    async def _serve_head(self, host: str) -> bool:
        """Run a node of this head until the head ends or this machine may leave; return True if it
        ever joined."""
        self._folder.clear_marks()
        node = await self._start_node(host)
        if node is None:
            return False
        self._why_away = ""
        member = self._member
        _log.info("joined", service=member.service, address=host, machine=member.number)
        try:
            await run_until_first(
                node.wait_until_ended(),
                self._wait_until_head_is_gone(host),
                self._wait_until_dismissed(),
            )
        finally:
            await node.close()
        return True

    async def _start_node(self, host: str) -> RayNode | None:
        """Start a node of this head; None if it does not join now. Raises ConfigError if the head
        refuses this machine."""
        member = self._member
        log = self._folder.logs / f"{member.service}-node-{member.number}-ray.log"
        environment = {**member.environment, **self._folder.to_environment()}
        try:
            return await RayNode.start_node(self._plan(host), self._token, log, environment)
        except ChildLostError as error:
            if any(word in str(error) for word in _REFUSALS):
                raise ConfigError(
                    f"the {member.service}'s Ray cluster refuses this machine: {error}"
                ) from error
            _log.warning("this machine has not joined", service=member.service, why=str(error))
            self._why_away = f"; {error}"
            return None

    def _may_leave(self) -> bool:
        """Return True once this machine is not needed; notify the head that it has to leave."""
        if self._folder.over.exists():
            return True
        if not self._drain.is_set():
            return False
        # A machine that is not used yet may leave without notice.
        if self._folder.joined.exists() and not self._folder.leaving.exists():
            _log.info("this machine has to leave: notifying its head")
            self._folder.leaving.touch()
        return not self._folder.joined.exists()

    def _plan(self, host: str) -> NodePlan:
        member = self._member
        offers = machine_offers(member.number, member.workers)
        return NodePlan(host, member.ray_port, own_address(host), member.gpus, offers)
