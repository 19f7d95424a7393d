"""A run whose second rank is on another machine, where any process may be killed."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import psutil

from flotilla_common.rpc.free_ports import free_port
from tests.faults.kills.sharded_learner import ShardedLife, sharded_config
from tests.faults.kills.sharded_run import LEARNER, RANK, ShardedRun, Strike
from tests.learner.ranks.nodes import Further, start_machine
from tests.support.process_commands import command_of
from tests.support.rank_configs import policy_config

# The rank on the further machine; that machine with all that runs on it.
FAR_RANK, MACHINE = "far rank", "machine"
VICTIMS = (LEARNER, RANK, FAR_RANK, MACHINE)


@dataclass(slots=True, kw_only=True)
class ClusterRun(ShardedRun):
    """`ShardedRun` on two machines; the second one is started again when it was killed."""

    ray_port: int = 0
    _machine: Further | None = None

    @asynccontextmanager
    async def two_machines(self) -> AsyncGenerator[None]:
        """Have the second machine while the block runs; it ends with the run."""
        self.ray_port = free_port()
        try:
            yield
            assert self._machine is not None
            assert await self._machine.ended() == 0
        finally:
            if self._machine is not None and self._machine.process.returncode is None:
                self._machine.process.kill()
                await self._machine.process.wait()

    async def live(self, strike: Strike | None) -> int:
        """See the base class."""
        if self._machine is None or self._machine.process.returncode is not None:
            config = sharded_config(self.folder, self.steps, self.every, self.ray_port)
            folder = self.folder / "machine"
            self._machine = await start_machine(folder, config, policy_config(self.model))
        return await ShardedRun.live(self, strike)

    def _make_life(self) -> ShardedLife:
        return replace(ShardedRun._make_life(self), ray_port=self.ray_port)

    def _strike(self, pid: int, victim: str) -> None:
        assert self._machine is not None
        machine = psutil.Process(self._machine.process.pid)
        there = [machine, *machine.children(recursive=True)]
        if victim == LEARNER:
            chosen = [psutil.Process(pid)]
        elif victim == RANK:
            chosen = _ranks_of(psutil.Process(pid).children())
        else:
            chosen = there if victim == MACHINE else _ranks_of(there)
        assert chosen
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.kills[victim] += 1


def _ranks_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if "flotilla_learner.rank" in command_of(process)]
