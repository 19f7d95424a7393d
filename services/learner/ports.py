"""What the learner needs from the world, in its own words."""

from pathlib import Path
from typing import Protocol

from services.learner.types import (
    CheckpointFiles,
    ModelInfo,
    PolicyId,
    Publication,
    StepResult,
    TrainBatch,
)


class RankError(Exception):
    """A rank died or refused; the message says what and carries the end of its log."""


class Ranks(Protocol):
    """The training ranks: everything with tensors, in processes of their own.

    One call at a time. Every method raises RankError when a rank died.
    """

    async def start(self, checkpoint: Path | None) -> ModelInfo:
        """Load the model, or model and optimizer from a checkpoint folder, and get ready."""
        ...

    async def train(self, batch: TrainBatch) -> StepResult:
        """Make the optimizer updates of one step. Deterministic given state and batch."""
        ...

    async def publish(self, version: int) -> Publication:
        """Write the current weights into shared memory and score the canary."""
        ...

    async def save(self, directory: Path) -> CheckpointFiles:
        """Write model and optimizer state under `directory` and fsync them."""
        ...

    async def close(self) -> None:
        """End the processes and remove what they hold in shared memory."""
        ...


class Snapshots(Protocol):
    """Serves publications to workers that do not share memory with the learner."""

    async def announce(self, publication: Publication, policy_id: PolicyId) -> None:
        """Have a publication ready under its name; call it before workers are told of it."""
        ...


class Tracker(Protocol):
    """Where metrics go. `step` is the number of optimizer steps behind the policy."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...
