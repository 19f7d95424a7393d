"""Interfaces to what the learner needs from the world, in its own words."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.common.domain.policy import PolicyId
from services.learner.types import (
    CheckpointFiles,
    Comparison,
    Histogram,
    ModelInfo,
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

    async def start_ranks(self, checkpoint: Path | None) -> ModelInfo:
        """Load the model, or model and optimizer from a checkpoint folder, and get ready."""
        ...

    async def train_step(self, batch: TrainBatch) -> StepResult:
        """Make the optimizer updates of one step. Deterministic given state and batch."""
        ...

    async def compare_batch(self, batch: TrainBatch, *, diagnose: bool = False) -> Comparison:
        """Score a batch again, each sequence with the weights of version `batch.step - 1 -
        staleness`, and compare with the behaviour logprobs. Changes nothing.

        With `diagnose`, find out what would explain a difference; that takes many passes.
        """
        ...

    async def publish_weights(self, version: int) -> Publication:
        """Write the current weights into shared memory and score the canary."""
        ...

    async def begin_checkpoint(self, directory: Path) -> Awaitable[CheckpointFiles]:
        """Copy model and optimizer state to host memory, and begin to write them to `directory`.

        Further calls may follow at once. What is returned ends when the files are fsynced, or with
        a RankError when they could not be written; then nothing writes there any more."""
        ...

    async def close(self) -> None:
        """End the processes and remove what they hold in shared memory."""
        ...


class SnapshotServer(Protocol):
    """Server of publications, for workers that do not share memory with the learner."""

    async def serve_publication(self, publication: Publication, policy_id: PolicyId) -> None:
        """Have a publication ready under its name; call it before workers are told of it."""
        ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Facts from the journal that a tracker has to know of the run's earlier starts."""

    # The same in every start of a run, and of no other run.
    tracker_id: str
    resumed: bool = False
    # The newest step whose metrics were logged.
    logged_step: int = 0


class Tracker(Protocol):
    """Destination of metrics. `step` is the number of optimizer steps behind the policy."""

    def open_run(self, run: TrackedRun) -> None:
        """Get ready, once, before the first point. Raises ConfigError for what a user must mend."""
        ...

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Take a point. Never blocks and never raises for what the network or a disk does."""
        ...

    def close(self) -> None:
        """Write down what is left; also when it was never opened."""
        ...


class RemoteStoreError(Exception):
    """A store did not do what it was asked to; the message names its URL, and what to look at."""


class RemoteStoreRefusedError(RemoteStoreError):
    """The store will not do it later either: no permission, no such bucket."""


class RemoteStore(Protocol):
    """Folder of one run in a remote store. Names are relative to it, parts joined by `/`.

    Blocks: call it from threads. Every method raises RemoteStoreRefusedError if trying again is
    in vain, else RemoteStoreError."""

    @property
    def url(self) -> str: ...

    def list_files(self, folder: str) -> list[str]:
        """List all files below a folder, in order; none when there is no such folder."""
        ...

    def read(self, name: str) -> bytes | None:
        """Read a small file; None when there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, in one piece if the store can."""
        ...

    def size(self, name: str) -> int | None:
        """Return the size in bytes; None when there is no such file."""
        ...

    def upload(self, path: Path, name: str, sent: Callable[[int], None]) -> None:
        """Copy a file of any size there; `sent` is told of bytes as they go."""
        ...

    def download(self, name: str, path: Path) -> bool:
        """Copy a file of any size from there; return False when there is no such file."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; one that is not there any more is no error."""
        ...

    def drop_unfinished(self) -> None:
        """Discard what the store keeps of uploads that never ended, if it keeps any."""
        ...
