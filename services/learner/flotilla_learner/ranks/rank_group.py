"""Rank processes on this machine, and possibly on others, that are commanded together."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_learner.config.rank import RankConfig
from flotilla_learner.ports import RankError
from flotilla_learner.ranks import protocol
from flotilla_learner.ranks.pending_calls import Answer, RankHandle
from flotilla_learner.ranks.rank_process import RankProcess, rank_environment
from flotilla_learner.ranks.rendezvous import Rendezvous, SingleMachineRendezvous

# After one rank has failed at a command, time for the others to fail or answer.
_GRACE_SECONDS = 5.0


class RankGroup:
    """`learner.rank.processes` ranks here, and those that `rendezvous` knows of elsewhere.

    `name` is the prefix of their files in `shm_dir`, a folder in shared memory. The first rank's
    output goes to `log_path`, that of rank k to `{stem}-{k}{suffix}` beside it."""

    def __init__(
        self,
        name: str,
        config: RankConfig,
        log_path: Path,
        shm_dir: Path,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.name = name
        self.shm_dir = shm_dir
        self._config = config
        self._log_path = log_path
        self._rendezvous = rendezvous or SingleMachineRendezvous(shm_dir, name)
        self._turn = asyncio.Lock()
        self._processes: list[RankProcess] = []
        self._elsewhere: Sequence[RankHandle] = ()

    async def start_processes(self) -> list[protocol.Message]:
        """Start the processes, after ending earlier ones; return the place of each rank."""
        await self.close()
        protocol.remove_stale_files(self.shm_dir, self.name)
        for index in range(self.local_count):
            self._processes.append(await self._spawn_rank(index))
        self._elsewhere = await self._rendezvous.wait_for_remote_ranks()
        meeting = await self._rendezvous.open_address(self._processes[0])
        here = self.local_count
        shared = {"count": self.rank_count, "rendezvous": meeting, "slots": here}
        return [{**shared, "index": i, "slot": i % here} for i in range(self.rank_count)]

    async def call_ranks(
        self, command: str, arguments: Sequence[Mapping[str, Any]]
    ) -> list[protocol.Message]:
        """Send a command to as many ranks as there are arguments; return their answers.

        Raises RankError if any of them fails."""
        async with self._turn:
            if not self._processes:
                raise RankError(f"{command}: the rank has not been started")
            chosen = self.all_ranks[: len(arguments)]
            pairs = zip(chosen, arguments, strict=True)
            answers = [rank.send_command(command, sent) for rank, sent in pairs]
            try:
                return await self._gather_answers(chosen, answers)
            finally:
                for answer in answers:
                    answer.cancel()

    def kill(self) -> None:
        """Kill all ranks at once; `close` must still be called."""
        for rank in self.all_ranks:
            rank.kill()

    async def close(self) -> None:
        """End the processes. May be called again, and in any state."""
        ranks = self.all_ranks
        self._processes, self._elsewhere = [], ()
        if not ranks:
            return
        await asyncio.gather(*(rank.close() for rank in ranks))
        protocol.remove_stale_files(self.shm_dir, self.name)

    @property
    def all_ranks(self) -> list[RankHandle]:
        """All ranks, in order of number."""
        return [*self._processes, *self._elsewhere]

    @property
    def local_count(self) -> int:
        """Number of ranks on this machine."""
        return self._config.processes

    @property
    def rank_count(self) -> int:
        return self.local_count + len(self._elsewhere)

    async def _spawn_rank(self, index: int) -> RankProcess:
        environment = rank_environment(self._config)
        spans_machines = self._rendezvous.spans_machines
        if self.local_count == 1 and not spans_machines:
            return await RankProcess.spawn_rank("the training rank", self._log_path, environment)
        if not spans_machines:
            # Ranks on one machine need no network interface but loopback.
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        log = self._log_path
        log = log.with_stem(f"{log.stem}-{index}") if index else log
        return await RankProcess.spawn_rank(f"training rank {index}", log, environment)

    async def _gather_answers(
        self, ranks: Sequence[RankHandle], answers: Sequence[Answer]
    ) -> list[protocol.Message]:
        _, missing = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        if missing:
            _, missing = await asyncio.wait(missing, timeout=_GRACE_SECONDS)
        errors = [(r, a.exception()) for r, a in zip(ranks, answers, strict=True) if a.done()]
        failed = [(rank, error) for rank, error in errors if error is not None]
        if not failed:
            return [answer.result() for answer in answers]
        if len(failed) < len(ranks):
            # Some ranks proceeded and others did not: their parameters no longer agree.
            self.kill()
        # Dead ranks first: their end is why others could not continue.
        failed.sort(key=lambda pair: not pair[0].has_ended)
        raise failed[0][1]
