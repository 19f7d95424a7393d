"""The rollout's view of the machines that carry one engine: the head of a Ray cluster, and the
further machines."""

import asyncio
import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flotilla_common.aio.concurrency import cancel_tasks, running_tasks, wait_for_any
from flotilla_common.process.line_channel import ChildLostError, describe_log_end
from flotilla_common.ray_cluster.cluster_settings import cluster_environment, derive_cluster_token
from flotilla_common.ray_cluster.machine_resources import ExpectedMachines, machine_offers
from flotilla_common.ray_cluster.machine_watch import MachinesLostError, MachineWatch
from flotilla_common.ray_cluster.node_folder import NodeFolder
from flotilla_common.ray_cluster.ray_node import NodePlan, RayNode
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import join_host_port
from flotilla_common.telemetry.log import get_logger
from flotilla_rollout.adapters.engine_cluster import EngineCluster, MachineSite, worker_logs
from flotilla_rollout.adapters.vllm_options import engine_environment
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import EngineDead

_log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeadSite:
    """The first machine of replica `replica`: `host` is its address for the others, `memory` a
    folder of this process alone, and `model` the model's folder."""

    replica: int
    token: str
    host: str
    logs: Path
    memory: Path
    model: Path


class EngineMachines:
    """All machines of an engine, from their joining until the rollout ends."""

    def __init__(self, site: HeadSite, head: RayNode, watch: MachineWatch) -> None:
        self._site = site
        self._head = head
        self._watch = watch
        self._draining: asyncio.Task[None] | None = None

    @staticmethod
    async def open_machines(config: EngineConfig, site: HeadSite) -> "EngineMachines":
        """Start the cluster's head and wait for the other machines. Raises EngineDead."""
        address = join_host_port(site.host, config.ray_port)
        try:
            head = await _start_head(config, site)
        except ChildLostError as error:
            raise EngineDead(f"no Ray cluster at {address}: {error}") from error
        try:
            log = site.logs / f"rollout-{site.replica}-machines.log"
            watch = await MachineWatch.open_watch(address, site.token, _expected(config), log)
        except MachinesLostError as error:
            await head.close()
            raise EngineDead(f"{error}; this machine waits at {address}") from error
        except BaseException:
            await head.close()
            raise
        _log.info("further machines have joined", machines=watch.names)
        # For vLLM's core, which inherits this process's environment.
        token_file = site.memory / "cluster-token"
        token_file.touch(0o600)
        token_file.write_text(derive_cluster_token(site.token))
        cluster = EngineCluster(address, config.nodes, config.machine_workers, site.replica)
        os.environ.update({**cluster_environment(token_file), **cluster.to_environment()})
        return EngineMachines(site, head, watch)

    @property
    def lost(self) -> str | None:
        """Reason why machines are lost; None while all are there."""
        return self._watch.lost

    async def start_beside(self, start: Coroutine[Any, Any, T]) -> T:
        """Return the engine that `start` starts. Raises EngineDead if a machine makes it fail, and
        ConfigError."""
        starting = asyncio.ensure_future(start)
        try:
            async with running_tasks(self._watch.wait_until_lost()) as (losing,):
                await wait_for_any((starting, losing))
        finally:
            if not starting.done():
                await cancel_tasks([starting])
        if starting.cancelled():
            raise EngineDead(await self.explain_death(str(self.lost)))
        error = starting.exception()
        if error is None:
            return starting.result()
        if isinstance(error, ConfigError):
            raise error
        reason = await self.explain_death(f"vLLM has not started: {error}")
        raise EngineDead(reason) from error

    async def explain_death(self, reason: str) -> str:
        """Return `reason` with further evidence: machines that do not answer, and the ends of the
        workers' logs if available."""
        there = await self._watch.read_tails(worker_logs(self._site.replica, "{number}"))
        logs = sorted(self._site.logs.glob(worker_logs(self._site.replica, 0)))
        # Ray may have noticed meanwhile.
        known = [reason] if self.lost in (None, reason) else [reason, self.lost]
        return "\n".join(part for part in (*known, there, *map(describe_log_end, logs)) if part)

    def drain_when_one_leaves(self, drain: asyncio.Event) -> None:
        """Set `drain` once a machine has to leave."""

        async def wait() -> None:
            name = await self._watch.wait_until_one_leaves()
            _log.warning("a machine has to go: draining", machine=name)
            drain.set()

        self._draining = asyncio.create_task(wait())

    async def dismiss_machines(self) -> None:
        """Notify the machines that the rollout has ended in order, and will not come back."""
        await self._watch.dismiss_machines()

    async def close(self) -> None:
        """End the cluster; machines that were not dismissed wait for the next head."""
        if self._draining is not None:
            await cancel_tasks([self._draining])
        await self._watch.close()
        await self._head.close()


def machine_environment(config: EngineConfig, model: Path, head: str) -> Mapping[str, str]:
    """Return the environment of the workers on a machine that has the model in this folder."""
    site = MachineSite(str(model), head, config.machine_workers)
    return {**engine_environment(config, local=True), **site.to_environment()}


async def _start_head(config: EngineConfig, site: HeadSite) -> RayNode:
    """Start the head, which offers this machine's workers. Raises ChildLostError."""
    plan = NodePlan(
        site.host,
        config.ray_port,
        gpus=config.machine_workers,
        resources=machine_offers(0, config.machine_workers),
    )
    folder = NodeFolder(site.memory, site.logs)
    environment = machine_environment(config, site.model, site.host)
    log = site.logs / f"rollout-{site.replica}-ray.log"
    return await RayNode.start_node(
        plan, site.token, log, {**environment, **folder.to_environment()}
    )


def _expected(config: EngineConfig) -> ExpectedMachines:
    return ExpectedMachines(
        machines=config.nodes,
        workers=config.machine_workers,
        least=config.workers,
        join_s=config.join_s,
        program="flotilla_rollout.nodes",
        workers_key="rollout.engine's workers for each machine",
        remedy="set rollout.engine.nodes to what there is",
    )
