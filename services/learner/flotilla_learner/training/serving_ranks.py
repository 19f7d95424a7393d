"""Rank processes that train models at callers' requests, as the service sees them."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.training import TrainingServiceConfig
from flotilla_learner.ports import RankError
from flotilla_learner.ranks import protocol, training_protocol
from flotilla_learner.ranks.rank_group import RankGroup
from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training_types import (
    AdamUpdate,
    AdapterChoice,
    BaseModel,
    TargetBatch,
    TargetScores,
)


class ServingRanks:
    """A group of ranks with a frozen base for adapters, or with weights that are trained.

    Every method raises RankError when a rank died: then all its models are lost."""

    def __init__(
        self, group: RankGroup, policy: PolicyConfig, config: TrainingServiceConfig, *, frozen: bool
    ) -> None:
        self._group = group
        self._policy = policy
        self._config = config
        self._frozen = frozen
        # A batch is in shared memory until its scores are read.
        self._batch_turn = asyncio.Lock()

    async def start(self) -> BaseModel:
        """Start the processes and load the base."""
        places = await self._group.start_processes()
        shared = {
            "name": self._group.name,
            "shm_dir": str(self._group.shm_dir),
            "policy": self._policy.model_dump(mode="json"),
            "rank": self._config.rank.model_dump(mode="json"),
            "frozen": self._frozen,
            **self._config.training.model_dump(mode="json"),
        }
        setups = [{**shared, "place": place} for place in places]
        answer, *_ = await self._group.call_ranks("serve", setups)
        return BaseModel(**answer)

    async def create(self, model: str, choice: AdapterChoice) -> int:
        """Create a model; return how many parameters are trained."""
        return (await self._call("create", model, choice=asdict(choice)))["parameters"]

    async def delete(self, model: str) -> None:
        await self._call("delete", model)

    async def accumulate(self, model: str, batch: TargetBatch) -> TargetScores:
        """Add the gradient of a batch's summed loss, unless only its scores are wanted. Raises
        OperationRefused."""
        path = protocol.batch_path(self._group.shm_dir, self._group.name)
        async with self._batch_turn:
            try:
                message = await asyncio.to_thread(training_protocol.write_targets, path, batch)
                answer = await self._call("accumulate", model, **message)
                return await asyncio.to_thread(training_protocol.read_scores, answer, batch)
            except (OSError, SafetensorError) as error:
                raise RankError(f"accumulate: no room in {path.parent}: {error}") from error
            finally:
                path.unlink(missing_ok=True)

    async def update(self, model: str, update: AdamUpdate) -> float:
        """Update the weights; return the gradient's norm. Raises OperationRefused."""
        return (await self._call("update", model, settings=asdict(update)))["grad_norm"]

    async def save(self, model: str, folder: Path, step: int, *, with_optimizer: bool) -> None:
        """Write a model's state. Raises OperationRefused."""
        arguments = {"folder": str(folder), "step": step, "with_optimizer": with_optimizer}
        await self._call("save", model, ranks=1, **arguments)

    async def load(self, model: str, folder: Path, *, with_optimizer: bool) -> None:
        """Replace a model's state by a saved one. Raises OperationRefused."""
        await self._call("load", model, folder=str(folder), with_optimizer=with_optimizer)

    async def close(self) -> None:
        """End the processes."""
        await self._group.close()

    async def _call(
        self, command: str, model: str, *, ranks: int | None = None, **arguments: Any
    ) -> protocol.Message:
        """Send a command to all ranks, or the first ones; return the first one's answer."""
        message: Mapping[str, Any] = {"model": model, **arguments}
        count = ranks or self._group.rank_count
        answer, *_ = await self._group.call_ranks(command, [message] * count)
        if "refused" in answer:
            raise OperationRefused(answer["refused"], answer["message"])
        return answer
