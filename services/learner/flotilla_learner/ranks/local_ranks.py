"""The training ranks as child processes on this machine, and possibly on others. Implements
`ports.Ranks`."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.ports import RankError
from flotilla_learner.ranks import protocol
from flotilla_learner.ranks.burn_in import BurnInPeaks, explain_failure
from flotilla_learner.ranks.pending_calls import Answer
from flotilla_learner.ranks.rank_group import RankGroup
from flotilla_learner.ranks.rendezvous import Rendezvous
from flotilla_learner.types import (
    BatchScore,
    CheckpointFiles,
    Comparison,
    ModelInfo,
    Publication,
    StepResult,
    TrainBatch,
)

_GIB = 2**30
_log = get_logger(__name__)


class LocalRanks:
    """A group of ranks that make a run's steps. All train; the first publishes and saves."""

    def __init__(
        self,
        name: str,
        policy: PolicyConfig,
        config: LearnerConfig,
        log_path: Path,
        shm_dir: Path,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """See `RankGroup`; without a `rendezvous` there are no ranks on other machines."""
        self._policy = policy
        self._config = config
        self._group = RankGroup(name, config.rank, log_path, shm_dir, rendezvous)

    async def start_ranks(self, checkpoint: Path | None) -> ModelInfo:
        """Start the processes; earlier ranks are ended first. See `ports.Ranks`."""
        places = await self._group.start_processes()
        setups = [self._setup_message(checkpoint, place) for place in places]
        try:
            info = await self._load_models(setups)
            if self._config.rank.burn_in.enabled:
                await self.burn_in(fresh=checkpoint is None)
        except asyncio.CancelledError:
            # A rank that is loading a model reads no commands, and has nothing to lose.
            self._group.kill()
            raise
        return info

    async def _load_models(self, setups: Sequence[protocol.Message]) -> ModelInfo:
        answers = await self._group.call_ranks("start", setups)
        peaks = [answer.pop("memory") for answer in answers]
        uncompiled = [why for answer in answers if (why := answer.pop("uncompiled"))]
        if any(answer != answers[0] for answer in answers):
            self._group.kill()
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
            found = await self._group.call_ranks("burn_in", [{}] * self._group.rank_count)
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
        keep = self._config.dumps.enabled
        answer = await self._call_with_batch("train", batch, keep_tokens=keep)
        return protocol.decode_step_result(answer)

    async def score_batch(self, batch: TrainBatch) -> BatchScore:
        """See `ports.Ranks`. Every rank computes a share."""
        return BatchScore(**await self._call_with_batch("score", batch))

    async def _call_with_batch(
        self, command: str, batch: TrainBatch, **also: bool
    ) -> protocol.Message:
        """Return the first rank's answer to a command that all ranks get with a batch.

        Ranks elsewhere cannot read its file: the first one sends it. Raises RankError."""
        path = protocol.batch_path(self._group.shm_dir, self._group.name)
        arguments = {**await _write_batch(command, path, batch), **also}
        here, count = self._group.local_count, self._group.rank_count
        per_rank = [arguments] * here + [{}] * (count - here)
        answer, *_ = await self._group.call_ranks(command, per_rank)
        path.unlink(missing_ok=True)
        return answer

    async def compare_batch(self, batch: TrainBatch, *, diagnose: bool = False) -> Comparison:
        """See `ports.Ranks`. Only the first rank computes it."""
        path = protocol.comparison_path(self._group.shm_dir, self._group.name)
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
        saving = self._group.all_ranks[: self._first_count]
        written = [rank.send_command("saved", {}) for rank in saving]
        return asyncio.create_task(_collect_files(directory, written))

    async def close(self) -> None:
        """See `ports.Ranks`. May be called again, and in any state."""
        await self._group.close()

    @property
    def _first_count(self) -> int:
        """Number of ranks that together hold all parameters."""
        return self._group.local_count if self._config.rank.shard else 1

    def _setup_message(self, checkpoint: Path | None, place: protocol.Message) -> protocol.Message:
        config = self._config
        # Only ranks on this machine can read its files.
        near = place["index"] < self._group.local_count
        return {
            "name": self._group.name,
            "shm_dir": str(self._group.shm_dir),
            "total_steps": config.total_steps,
            "warm": {"count": config.warm_steps, "lr": config.warm_start and config.warm_start.lr},
            "policy": self._policy.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "optimizer": config.optimizer.model_dump(mode="json"),
            "rank": config.rank.model_dump(mode="json"),
            "lora": None if config.lora is None else config.lora.model_dump(mode="json"),
            "checkpoint": str(checkpoint) if checkpoint is not None and near else None,
            "place": place,
        }

    async def _call_first(self, command: str, arguments: Mapping[str, Any]) -> protocol.Message:
        """Return the first rank's answer to a command for it alone, or for this machine's ranks
        if each has a part of the parameters. Raises RankError."""
        return (await self._group.call_ranks(command, [arguments] * self._first_count))[0]


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
