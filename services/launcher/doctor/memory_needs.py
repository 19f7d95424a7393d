"""Memory that a run needs, by its spec and its model's size. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.common.spec.spec import PolicyConfig
from services.launcher.doctor.memory_estimate import (
    EngineMemory,
    TrainerMemory,
    estimate_engine,
    estimate_trainer,
    format_gib,
    weight_slot_bytes,
)
from services.launcher.doctor.model_size import ModelSize


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """A run as far as its memory goes. `learner` and `rollout` are its sections, whole."""

    model: ModelSize
    dtype: str
    max_len: int
    learner: Mapping[str, Any]
    rollout: Mapping[str, Any]
    adapters_alone: bool = False

    @staticmethod
    def from_spec(
        model: ModelSize,
        policy: PolicyConfig,
        learner: Mapping[str, Any],
        rollout: Mapping[str, Any],
    ) -> "MemoryNeeds":
        alone = policy.adapter_rank is not None
        return MemoryNeeds(model, policy.dtype, policy.max_model_len, learner, rollout, alone)

    @property
    def trainer(self) -> TrainerMemory:
        return estimate_trainer(self.model, self.dtype, self.max_len, self.learner)

    @property
    def shared(self) -> int:
        """Bytes in shared memory."""
        return weight_slot_bytes(
            self.model, self.dtype, self.learner, adapters_alone=self.adapters_alone
        )

    @property
    def engine(self) -> EngineMemory:
        return estimate_engine(self.model, self.dtype, self.max_len, self.rollout)

    def with_rank(self, **changed: object) -> "MemoryNeeds":
        """Return the needs of a run with these keys of `[learner.rank]`."""
        rank = {**self.learner["rank"], **changed}
        return replace(self, learner={**self.learner, "rank": rank})

    def with_engine(self, **changed: object) -> "MemoryNeeds":
        """Return the needs of a run with these keys of `[rollout.engine]`."""
        engine = {**self.rollout["engine"], **changed}
        return replace(self, rollout={**self.rollout, "engine": engine})

    def describe(self) -> str:
        """Describe the needs in one line."""
        engine = self.engine
        return (
            f"{self.model.parameters / 1e9:.2f} B parameters; learner {self._describe_trainer()},"
            f" rollout {format_gib(engine.weights)} of weights and {format_gib(engine.sequence)} of"
            f" KV a sequence at up to {engine.max_num_seqs} sequences"
        )

    def _describe_trainer(self) -> str:
        trainer, rank = self.trainer, self.trainer.rank
        if not trainer.device:
            return (
                f"{format_gib(trainer.host)} of memory ({format_gib(trainer.estimated)} of it"
                " estimated activations)"
            )
        kinds = ("parameters", "gradients", "moments", "reference")
        parts = [
            f"{kind} {format_gib(getattr(rank, kind))}" for kind in kinds if getattr(rank, kind)
        ]
        away = f", {format_gib(rank.offloaded)} more on the host" if rank.offloaded else ""
        return (
            f"{format_gib(trainer.device)} a GPU ({', '.join(parts)},"
            f" {format_gib(rank.activations)} of estimated activations{away})"
        )
