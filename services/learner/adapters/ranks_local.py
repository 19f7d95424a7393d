"""The training ranks as child processes on this machine. Implements `ports.Ranks`."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from services.common.shared_memory import SHARED_MEMORY
from services.common.spec import PolicyConfig
from services.learner.adapters.rank_process import Answer, RankProcess
from services.learner.config import LearnerConfig
from services.learner.guard.types import Comparison
from services.learner.guard.wire import decode_comparison
from services.learner.ports import RankError
from services.learner.rank import wire
from services.learner.types import CheckpointFiles, ModelInfo, Publication, StepResult, TrainBatch

# When one rank has failed at a command, the others may take so long to fail or answer too.
_GRACE_SECONDS = 5.0


class LocalRanks:
    """`learner.rank.processes` ranks. All train; the first publishes and saves.

    `name` begins the names of their files in shared memory. What the first prints goes to
    `log_path`, what rank k prints to `{stem}-{k}{suffix}` beside it.
    """

    def __init__(
        self,
        name: str,
        policy: PolicyConfig,
        config: LearnerConfig,
        log_path: Path,
        shm_dir: Path = SHARED_MEMORY,
    ) -> None:
        self._name = name
        self._policy = policy
        self._config = config
        self._log_path = log_path
        self._shm_dir = shm_dir
        self._turn = asyncio.Lock()
        self._processes: list[RankProcess] = []

    @property
    def pids(self) -> list[int]:
        """Of the processes, the first rank's first."""
        return [process.pid for process in self._processes]

    async def start(self, checkpoint: Path | None) -> ModelInfo:
        """Starts the processes; ranks that ran before are ended first. See `ports.Ranks`."""
        await self.close()
        wire.remove_stale(self._shm_dir, self._name)
        for index in range(self._count):
            self._processes.append(await self._spawn(index))
        setups = [self._setup(checkpoint, index) for index in range(self._count)]
        return wire.decode_model_info(await self._call("start", setups))

    async def train(self, batch: TrainBatch) -> StepResult:
        """See `ports.Ranks`."""
        path = wire.batch_path(self._shm_dir, self._name)
        try:
            arguments = await asyncio.to_thread(wire.write_batch, path, batch)
        except (OSError, SafetensorError) as error:
            raise RankError(f"train: the batch cannot be written to {path}: {error}") from error
        answer = await self._call("train", [arguments] * self._count)
        path.unlink(missing_ok=True)
        return wire.decode_step_result(answer)

    async def compare(self, batch: TrainBatch, *, diagnose: bool = False) -> Comparison:
        """See `ports.Ranks`. The first rank alone computes it."""
        path = wire.comparison_path(self._shm_dir, self._name)
        try:
            arguments = await asyncio.to_thread(wire.write_batch, path, batch)
        except (OSError, SafetensorError) as error:
            raise RankError(f"compare: the batch cannot be written to {path}: {error}") from error
        answer = await self._call("compare", [{**arguments, "diagnose": diagnose}])
        path.unlink(missing_ok=True)
        return decode_comparison(answer)

    async def publish(self, version: int) -> Publication:
        """See `ports.Ranks`."""
        return wire.decode_publication(await self._call("publish", [{"version": version}]))

    async def save(self, directory: Path) -> CheckpointFiles:
        """See `ports.Ranks`."""
        return wire.decode_checkpoint(await self._call("save", [{"directory": str(directory)}]))

    async def close(self) -> None:
        """See `ports.Ranks`. May be called again, and in any state."""
        processes, self._processes = self._processes, []
        if not processes:
            return
        await asyncio.gather(*(process.close() for process in processes))
        wire.remove_stale(self._shm_dir, self._name)

    @property
    def _count(self) -> int:
        return self._config.rank.processes

    def _setup(self, checkpoint: Path | None, index: int) -> wire.Message:
        config = self._config
        rendezvous = wire.rendezvous_path(self._shm_dir, self._name)
        return {
            "name": self._name,
            "shm_dir": str(self._shm_dir),
            "total_steps": config.steps,
            "policy": self._policy.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "optimizer": config.optimizer.model_dump(mode="json"),
            "rank": config.rank.model_dump(mode="json"),
            "checkpoint": str(checkpoint) if checkpoint else None,
            "place": {"index": index, "count": self._count, "rendezvous": str(rendezvous)},
        }

    async def _spawn(self, index: int) -> RankProcess:
        threads = str(self._config.rank.threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self._count == 1:
            return await RankProcess.spawn("the training rank", self._log_path, environment)
        # Ranks of one machine have no business on its network.
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        log = self._log_path
        log = log.with_stem(f"{log.stem}-{index}") if index else log
        return await RankProcess.spawn(f"training rank {index}", log, environment)

    async def _call(self, command: str, arguments: Sequence[Mapping[str, Any]]) -> wire.Message:
        """The first rank's answer to a command, which as many ranks get as there are arguments.

        Raises RankError when any of them fails.
        """
        async with self._turn:
            if not self._processes:
                raise RankError(f"{command}: the rank has not been started")
            chosen = self._processes[: len(arguments)]
            pairs = zip(chosen, arguments, strict=True)
            answers = [process.send(command, sent) for process, sent in pairs]
            try:
                return await self._first(chosen, answers)
            finally:
                for answer in answers:
                    answer.cancel()

    async def _first(
        self, processes: Sequence[RankProcess], answers: Sequence[Answer]
    ) -> wire.Message:
        _, missing = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        if missing:
            _, missing = await asyncio.wait(missing, timeout=_GRACE_SECONDS)
        errors = [(p, a.exception()) for p, a in zip(processes, answers, strict=True) if a.done()]
        failed = [(process, error) for process, error in errors if error is not None]
        if not failed:
            return answers[0].result()
        if len(failed) < len(processes):
            # Some went on and some did not: they no longer hold the same parameters.
            for process in self._processes:
                process.kill()
        # That one died is why others could not go on.
        failed.sort(key=lambda pair: not pair[0].ended)
        raise failed[0][1]
