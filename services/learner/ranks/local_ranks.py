"""The training ranks as child processes on this machine, and possibly on others. Implements
`ports.Ranks`."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from services.common.spec.spec import PolicyConfig
from services.common.telemetry.log import get_logger
from services.learner.config.learner import LearnerConfig
from services.learner.ports import RankError
from services.learner.ranks import protocol
from services.learner.ranks.burn_in import BurnInPeaks, explain_failure
from services.learner.ranks.pending_calls import Answer, RankHandle
from services.learner.ranks.rank_process import RankProcess, rank_environment
from services.learner.ranks.rendezvous import Rendezvous, SingleMachineRendezvous
from services.learner.types import (
    CheckpointFiles,
    Comparison,
    ModelInfo,
    Publication,
    StepResult,
    TrainBatch,
)

# After one rank has failed at a command, time for the others to fail or answer.
_GRACE_SECONDS = 5.0
_GIB = 2**30
_log = get_logger(__name__)


class LocalRanks:
    """`learner.rank.processes` ranks here. All train; the first publishes and saves.

    `name` is the prefix of their files in `shm_dir`, a folder in shared memory. The first rank's
    output goes to `log_path`, that of rank k to `{stem}-{k}{suffix}` beside it. `rendezvous`
    knows of ranks on other machines; without one there are none."""

    def __init__(
        self,
        name: str,
        policy: PolicyConfig,
        config: LearnerConfig,
        log_path: Path,
        shm_dir: Path,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._name = name
        self._policy = policy
        self._config = config
        self._log_path = log_path
        self._shm_dir = shm_dir
        self._rendezvous = rendezvous or SingleMachineRendezvous(shm_dir, name)
        self._turn = asyncio.Lock()
        self._processes: list[RankProcess] = []
        self._elsewhere: Sequence[RankHandle] = ()

    async def start_ranks(self, checkpoint: Path | None) -> ModelInfo:
        """Start the processes; earlier ranks are ended first. See `ports.Ranks`."""
        await self.close()
        protocol.remove_stale_files(self._shm_dir, self._name)
        for index in range(self._local_count):
            self._processes.append(await self._spawn_rank(index))
        self._elsewhere = await self._rendezvous.wait_for_remote_ranks()
        rendezvous = await self._rendezvous.open_address(self._processes[0])
        setups = [
            self._setup_message(checkpoint, index, rendezvous) for index in range(self._rank_count)
        ]
        try:
            info = await self._load_models(setups)
            if self._config.rank.burn_in.enabled:
                await self.burn_in(fresh=checkpoint is None)
        except asyncio.CancelledError:
            # A rank that is loading a model reads no commands, and has nothing to lose.
            for rank in self._all_ranks:
                rank.kill()
            raise
        return info

    async def _load_models(self, setups: Sequence[protocol.Message]) -> ModelInfo:
        answers = await self._call_ranks("start", setups)
        peaks = [answer.pop("memory") for answer in answers]
        uncompiled = [why for answer in answers if (why := answer.pop("uncompiled"))]
        if any(answer != answers[0] for answer in answers):
            for rank in self._all_ranks:
                rank.kill()
            raise RankError(f"start: the ranks have loaded different models: {answers}")
        _log.info(
            "ranks loaded",
            peak_gib=[round(peak["host"] / _GIB, 2) for peak in peaks],
            gpu_peak_gib=[round(peak["device"] / _GIB, 2) for peak in peaks if peak["device"]],
        )
        if uncompiled:
            _log.warning(
                "learner.rank.compile: decoder blocks run uncompiled",
                ranks=len(uncompiled),
                why=uncompiled[0],
            )
        return protocol.decode_model_info(answers[0])

    async def burn_in(self, *, fresh: bool) -> None:
        """Have every rank try the longest pack, and log its memory use.

        Raises ConfigError if the memory is too small, and RankError."""
        try:
            found = await self._call_ranks("burn_in", [{}] * self._rank_count)
        except RankError as error:
            limit = self._policy.max_model_len
            raise explain_failure(error, self._config.rank, limit, fresh=fresh) from error
        peaks = [BurnInPeaks(**answer) for answer in found]
        _log.info(
            "burn-in passed",
            tokens=peaks[0].tokens,
            seconds=round(max(peak.seconds for peak in peaks), 3),
            peak_gib=[round(peak.host / _GIB, 2) for peak in peaks],
            gpu_peak_gib=[round(peak.device / _GIB, 2) for peak in peaks if peak.device],
        )

    async def train_step(self, batch: TrainBatch) -> StepResult:
        path = protocol.batch_path(self._shm_dir, self._name)
        arguments = await _write_batch("train", path, batch)
        # Ranks elsewhere cannot read the file: the first one sends it.
        arguments["keep_tokens"] = self._config.dumps.enabled
        per_rank = [arguments] * self._local_count + [{}] * len(self._elsewhere)
        answer, *_ = await self._call_ranks("train", per_rank)
        path.unlink(missing_ok=True)
        return protocol.decode_step_result(answer)

    async def compare_batch(self, batch: TrainBatch, *, diagnose: bool = False) -> Comparison:
        """See `ports.Ranks`. Only the first rank computes it."""
        path = protocol.comparison_path(self._shm_dir, self._name)
        arguments = await _write_batch("compare", path, batch)
        answer = await self._call_first("compare", {**arguments, "diagnose": diagnose})
        path.unlink(missing_ok=True)
        return protocol.COMPARISON.validate_python(answer)

    async def publish_weights(self, version: int) -> Publication:
        return protocol.decode_publication(await self._call_first("publish", {"version": version}))

    async def begin_checkpoint(self, directory: Path) -> Awaitable[CheckpointFiles]:
        """See `ports.Ranks`. Every rank that holds parts copies and writes them."""
        await self._call_first("save", {"directory": str(directory)})
        # Not in turn: other commands are answered meanwhile.
        written = [rank.send_command("saved", {}) for rank in self._all_ranks[: self._first_count]]
        return asyncio.create_task(_collect_files(directory, written))

    async def close(self) -> None:
        """See `ports.Ranks`. May be called again, and in any state."""
        ranks = self._all_ranks
        self._processes, self._elsewhere = [], ()
        if not ranks:
            return
        await asyncio.gather(*(rank.close() for rank in ranks))
        protocol.remove_stale_files(self._shm_dir, self._name)

    @property
    def _all_ranks(self) -> list[RankHandle]:
        """All ranks, in order of number."""
        return [*self._processes, *self._elsewhere]

    @property
    def _local_count(self) -> int:
        return self._config.rank.processes

    @property
    def _rank_count(self) -> int:
        return self._local_count + len(self._elsewhere)

    @property
    def _first_count(self) -> int:
        """Number of ranks that together hold all parameters."""
        return self._local_count if self._config.rank.shard else 1

    def _setup_message(
        self, checkpoint: Path | None, index: int, rendezvous: str
    ) -> protocol.Message:
        config, here = self._config, self._local_count
        place = {"index": index, "count": self._rank_count, "rendezvous": rendezvous}
        # Only ranks on this machine can read its files.
        seen = str(checkpoint) if checkpoint is not None and index < here else None
        return {
            "name": self._name,
            "shm_dir": str(self._shm_dir),
            "total_steps": config.steps,
            "policy": self._policy.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "optimizer": config.optimizer.model_dump(mode="json"),
            "rank": config.rank.model_dump(mode="json"),
            "lora": None if config.lora is None else config.lora.model_dump(mode="json"),
            "checkpoint": seen,
            "place": {**place, "slot": index % here, "slots": here},
        }

    async def _spawn_rank(self, index: int) -> RankProcess:
        environment = rank_environment(self._config.rank)
        spans_machines = self._rendezvous.spans_machines
        if self._local_count == 1 and not spans_machines:
            return await RankProcess.spawn_rank("the training rank", self._log_path, environment)
        if not spans_machines:
            # Ranks on one machine need no network interface but loopback.
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        log = self._log_path
        log = log.with_stem(f"{log.stem}-{index}") if index else log
        return await RankProcess.spawn_rank(f"training rank {index}", log, environment)

    async def _call_first(self, command: str, arguments: Mapping[str, Any]) -> protocol.Message:
        """Return the first rank's answer to a command for it alone, or for this machine's ranks
        if each has a part of the parameters. Raises RankError."""
        return (await self._call_ranks(command, [arguments] * self._first_count))[0]

    async def _call_ranks(
        self, command: str, arguments: Sequence[Mapping[str, Any]]
    ) -> list[protocol.Message]:
        """Send a command to as many ranks as there are arguments; return their answers.

        Raises RankError if any of them fails."""
        async with self._turn:
            if not self._processes:
                raise RankError(f"{command}: the rank has not been started")
            chosen = self._all_ranks[: len(arguments)]
            pairs = zip(chosen, arguments, strict=True)
            answers = [rank.send_command(command, sent) for rank, sent in pairs]
            try:
                return await self._gather_answers(chosen, answers)
            finally:
                for answer in answers:
                    answer.cancel()

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
            for rank in self._all_ranks:
                rank.kill()
        # Dead ranks first: their end is why others could not continue.
        failed.sort(key=lambda pair: not pair[0].has_ended)
        raise failed[0][1]


async def _write_batch(command: str, path: Path, batch: TrainBatch) -> protocol.Message:
    try:
        return await asyncio.to_thread(protocol.write_batch, path, batch)
    except (OSError, SafetensorError) as error:
        raise RankError(f"{command}: the batch cannot be written to {path}: {error}") from error


async def _collect_files(directory: Path, written: Sequence[Answer]) -> CheckpointFiles:
    """Wait until every rank has written its files or failed to, so that none writes any more.

    Raises the first one's RankError."""
    answers = await asyncio.gather(*written, return_exceptions=True)
    sha256: dict[str, str] = {}
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        sha256 |= protocol.CHECKPOINT.validate_python(answer).sha256
    return CheckpointFiles(directory, sha256)
