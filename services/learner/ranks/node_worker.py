"""Program of a further machine: a Ray node for one learner after the other."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.common.concurrency import run_until_first
from services.common.errors import ConfigError
from services.common.log import get_logger
from services.common.network_interfaces import own_address
from services.common.ray_cluster.ray_node import NodePlan, RayNode, RayNodeError
from services.learner.config.rank import RankConfig
from services.learner.ranks.cluster_plan import RANK_RESOURCE, machine_resource
from services.learner.ranks.node_folder import NODE_FOLDER_VARIABLE, NodeFolder

_LOOK_S = 0.5
_DIAL_S = 2.0
_UNREACHED_S = 10.0
# In what `ray start` says when it will never be let in.
_REFUSALS = ("uthenticat", "ersion mismatch", "token")
_log = get_logger(__name__)

# Returns the learner's host; waits until it is known.
FindLearner = Callable[[], Awaitable[str]]


class NodeWorker:
    """Keeps a Ray node at the learner's head until the learner has ended in order."""

    def __init__(
        self,
        find_learner: FindLearner,
        number: int,
        config: RankConfig,
        token: str,
        folder: NodeFolder,
        drain: asyncio.Event,
    ) -> None:
        """Plan machine `number`; `folder` is its own, where its ranks write their logs."""
        self._find_learner = find_learner
        self._number = number
        self._config = config
        self._token = token
        self._folder = folder
        self._drain = drain
        self._why_away = ""

    async def run_until_over(self) -> None:
        """Return when the learner has ended in order, or this machine may go.

        Raises TimeoutError after `join_s` without a learner, ConfigError when it is refused."""
        patience = self._config.join_s
        seen = time.monotonic()
        while not self._drain.is_set():
            if time.monotonic() - seen > patience:
                raise TimeoutError(
                    f"no learner for {patience:g} s: see its log, and that --registry or --peer"
                    f" learner=HOST:PORT and learner.rank.ray_port are right{self._why_away}"
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
                host = await self._find_learner()
            await self._dial_head(host)
        except (OSError, TimeoutError):
            return None
        return host

    async def _dial_head(self, host: str) -> None:
        async with asyncio.timeout(_DIAL_S):
            _, writer = await asyncio.open_connection(host, self._config.ray_port)
        writer.close()

    async def _wait_until_head_is_gone(self, host: str) -> None:
        """Return when nothing listens at the head's port any more, or its machine has not been
        reached for long; Ray takes longer to find out."""
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
        """Be a node of this head until that ends, or this one may; return True if it ever was."""
        self._folder.clear_marks()
        log: Path = self._folder.path / "logs" / f"learner-node-{self._number}-ray.log"
        environment = {NODE_FOLDER_VARIABLE: str(self._folder.path)}
        try:
            node = await RayNode.start_node(self._plan(host), self._token, log, environment)
        except RayNodeError as error:
            if any(word in str(error) for word in _REFUSALS):
                raise ConfigError(
                    f"the learner's Ray cluster refuses this machine: {error}"
                ) from error
            _log.warning("this machine has not joined the learner", why=str(error))
            self._why_away = f"; {error}"
            return False
        self._why_away = ""
        _log.info("joined the learner", address=host, machine=self._number)
        try:
            await run_until_first(
                node.wait_until_ended(),
                self._wait_until_head_is_gone(host),
                self._wait_until_dismissed(),
            )
        finally:
            await node.close()
        return True

    def _may_leave(self) -> bool:
        """Return True once nobody needs this machine; have the learner told that it has to go."""
        if self._folder.over.exists():
            return True
        if not self._drain.is_set():
            return False
        # Nobody misses a machine that has no rank yet.
        if self._folder.joined.exists() and not self._folder.leaving.exists():
            _log.info("this machine has to go: the learner is told")
            self._folder.leaving.touch()
        return not self._folder.joined.exists()

    def _plan(self, host: str) -> NodePlan:
        processes = self._config.processes
        gpus = processes if self._config.device == "cuda" else 0
        offers = {RANK_RESOURCE: processes, machine_resource(self._number): 1}
        return NodePlan(host, self._config.ray_port, own_address(host), gpus, offers)
