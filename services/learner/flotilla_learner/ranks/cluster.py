"""Ranks on a learner's other machines, reached through Ray."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.process.line_channel import ChildLostError
from flotilla_common.ray_cluster.cluster_settings import derive_cluster_token
from flotilla_common.ray_cluster.ray_node import NodePlan, RayNode
from flotilla_common.rpc.network_addresses import join_host_port
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.ports import RankError
from flotilla_learner.ranks.cluster_plan import ClusterPlan
from flotilla_learner.ranks.pending_calls import Answer, RankHandle
from flotilla_learner.ranks.rank_process import RankProcess, rank_environment

_DRIVER = "flotilla_learner.ranks.adapters.ray_driver"
_log = get_logger(__name__)


class RemoteRank:
    """One rank on another machine. Implements `ranks.pending_calls.RankHandle`."""

    def __init__(self, driver: RankProcess, index: int) -> None:
        """Create the handle of rank `index` among those on other machines; it and all others live
        as long as their Ray driver."""
        self._driver = driver
        self._index = index
        self._ended = False

    @property
    def has_ended(self) -> bool:
        return self._ended or self._driver.has_ended

    def send_command(self, command: str, arguments: Mapping[str, Any]) -> Answer:
        call = {"rank": self._index, "command": command, "arguments": arguments}
        answer: Answer = asyncio.get_running_loop().create_future()
        driven = self._driver.send_command("call", call)
        driven.add_done_callback(lambda done: self._complete(answer, done))
        return answer

    def kill(self) -> None:
        """Kill the driver, upon which Ray ends the whole group: no other rank could continue."""
        self._driver.kill()

    async def close(self) -> None:
        await self._driver.close()

    def _complete(self, answer: Answer, driven: Answer) -> None:
        error = driven.exception()
        if error is None and "error" in (outcome := driven.result()):
            self._ended = self._ended or outcome["ended"]
            error = RankError(outcome["error"])
        if answer.done():
            return
        if error is None:
            answer.set_result(driven.result()["result"])
        else:
            answer.set_exception(error)


@dataclass(frozen=True, slots=True)
class ClusterSite:
    """Place of a run's cluster: `host` is this machine's address that all others reach."""

    run_id: str
    token: str
    host: str
    logs: Path


class RayCluster:
    """The learner's head of a Ray cluster, and its groups of ranks, one after another.

    Implements `ranks.rendezvous.Rendezvous`."""

    spans_machines = True

    def __init__(
        self, site: ClusterSite, policy: PolicyConfig, config: RankConfig, drain: asyncio.Event
    ) -> None:
        """Plan a cluster; `drain` is set when one of its machines is about to leave."""
        self._site = site
        self._policy = policy
        self._config = config
        self._drain = drain
        self._head: RayNode | None = None
        self._driver: RankProcess | None = None
        self._watching: asyncio.Task[None] | None = None

    async def wait_for_remote_ranks(self) -> Sequence[RankHandle]:
        await self._end_group()
        await self._open_head()
        driver = self._driver = await RankProcess.spawn_rank(
            "the Ray driver", self._site.logs / "learner-ray-driver.log", {}, _DRIVER
        )
        opened = await driver.send_command("open", asdict(self._plan()))
        names: list[str] = opened["names"]
        _log.info("other machines have joined", ranks=names)
        if names:
            self._watching = asyncio.create_task(self._drain_when_one_leaves(driver))
        return [RemoteRank(driver, index) for index in range(len(names))]

    async def open_address(self, first: RankHandle) -> str:
        return (await first.send_command("host", {"host": self._site.host}))["rendezvous"]

    async def dismiss_machines(self) -> None:
        """Notify the machines that the learner has ended normally, and will not come back."""
        if self._driver is not None and not self._driver.has_ended:
            try:
                await self._driver.send_command("dismiss", {})
            except RankError as error:
                _log.warning("cannot notify machines of the run's end", why=str(error))

    async def close(self) -> None:
        """Close group and head."""
        await self._end_group()
        if self._head is not None:
            await self._head.close()

    def _plan(self) -> ClusterPlan:
        site, config = self._site, self._config
        return ClusterPlan(
            address=join_host_port(site.host, config.ray_port),
            token=derive_cluster_token(site.token),
            run_id=site.run_id,
            machines=config.nodes,
            processes=config.processes,
            min_ranks=config.min_ranks or config.nodes * config.processes,
            join_s=config.join_s,
            gpus=config.device == "cuda",
            model=self._policy.model,
            revision=self._policy.revision,
            environment=rank_environment(config),
        )

    async def _open_head(self) -> None:
        if self._head is not None and not self._head.has_ended:
            return
        plan = NodePlan(self._site.host, self._config.ray_port)
        log = self._site.logs / "learner-ray.log"
        try:
            self._head = await RayNode.start_node(plan, self._site.token, log)
        except ChildLostError as error:
            raise RankError(f"no Ray cluster at port {plan.port}: {error}") from error

    async def _drain_when_one_leaves(self, driver: RankProcess) -> None:
        try:
            machine = (await driver.send_command("leaving", {}))["machine"]
        except RankError:
            # Callers of a rank get the error.
            return
        if machine is not None:
            _log.warning("a machine is about to leave: draining", machine=machine)
            self._drain.set()

    async def _end_group(self) -> None:
        if self._watching is not None:
            await cancel_tasks([self._watching])
            self._watching = None
        if self._driver is not None:
            await self._driver.close()
            self._driver = None


@asynccontextmanager
async def dismissed_at_end(cluster: RayCluster | None) -> AsyncGenerator[None]:
    """Dismiss all other machines if the block ends normally, else let them wait for the next
    learner."""
    yield
    if cluster is not None:
        await cluster.dismiss_machines()
