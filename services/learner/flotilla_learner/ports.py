"""Ports of the learner: protocols for its ranks, trackers and stores."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.types import (
    BatchScore,
    CheckpointFiles,
    Comparison,
    Histogram,
    ModelInfo,
    Publication,
    StepResult,
    TeacherScores,
    TrainBatch,
)


class RankError(Exception):
    """A rank died or refused; the message gives the reason and the end of its log."""


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
        staleness`, and compare with the behaviour logprobs. Changes no state.

        With `diagnose`, also search for the cause of a difference, which takes many passes.
        """
        ...

    async def score_batch(self, batch: TrainBatch) -> BatchScore:
        """Score the policy tokens of a batch under the current weights. Changes no state."""
        ...

    async def publish_weights(self, version: int) -> Publication:
        """Write the current weights into shared memory and score the canary."""
        ...

    async def begin_checkpoint(self, directory: Path) -> Awaitable[CheckpointFiles]:
        """Copy model and optimizer state to host memory, and start writing them to `directory`.

        Other calls may follow at once. The awaitable resolves once the files are fsynced, or raises
        RankError if they could not be written; after either, nothing writes there any more."""
        ...

    async def close(self) -> None:
        """End the processes and remove their shared memory."""
        ...


class SnapshotServer(Protocol):
    """Server of publications, for workers that do not share memory with the learner."""

    async def serve_publication(self, publication: Publication, policy_id: PolicyId) -> None:
        """Make a publication available under its name; call it before announcing it to workers."""
        ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Journaled facts about the run's earlier starts that a tracker needs."""

    # Unique to the run, and the same at each of its starts.
    tracker_id: str
    resumed: bool = False
    # The newest step whose metrics were logged.
    logged_step: int = 0
    run_id: str = ""


class Tracker(Protocol):
    """Destination of metrics. `step` is the number of optimizer steps behind the policy."""

    def open_run(self, run: TrackedRun) -> str | None:
        """Get ready, once, before the first point; by default there is nothing to do. Return the
        URL of the run's page, if it has one. Raises ConfigError if the user must act."""
        return None

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Log a point. Never blocks; never raises because of the network or a disk."""
        ...

    def close(self) -> None:
        """Flush what is left, by default nothing; safe to call on a tracker that was never
        opened."""
        return


class RemoteStoreError(Exception):
    """An operation on a store failed; the message names the URL and what to check."""


class RemoteStoreRefusedError(RemoteStoreError):
    """The failure is permanent: no permission, no such bucket."""


class RemoteStore(Protocol):
    """Folder of one run in a remote store. Names are relative to it, parts joined by `/`.

    Methods block: call them from threads. Each raises RemoteStoreRefusedError if a retry is
    pointless, else RemoteStoreError."""

    @property
    def url(self) -> str: ...

    def list_files(self, folder: str) -> list[str]:
        """List all files below a folder, in order; empty if the folder does not exist."""
        ...

    def read(self, name: str) -> bytes | None:
        """Read a small file; return None if it does not exist."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, atomically if the store supports it."""
        ...

    def size(self, name: str) -> int | None:
        """Return the size in bytes; None if the file does not exist."""
        ...

    def upload(self, path: Path, name: str, sent: Callable[[int], None]) -> None:
        """Upload a file of any size; calls `sent` with byte counts as they are sent."""
        ...

    def download(self, name: str, path: Path) -> bool:
        """Download a file of any size; return False if it does not exist."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; missing ones are not an error."""
        ...

    def drop_unfinished(self) -> None:
        """Discard what the store keeps of unfinished uploads."""
        ...


class TeacherDownError(Exception):
    """The teacher gave no answer; the same question may get one later. `wait_s` is for how long it
    wants none."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class TeacherRefusedError(ConfigError):
    """The teacher refused, or answered what cannot be learned from; the message names the fix.
    Asking again cannot help."""


class Teacher(Protocol):
    """A policy that scores tokens which another has sampled.

    Methods raise TeacherDownError and TeacherRefusedError; no number is ever made up."""

    @property
    def top_k(self) -> int:
        """Number of its likeliest tokens that it returns with each score."""
        ...

    async def prove_tokenizer(self, hint_tokens: int = 0) -> None:
        """Check that the teacher reads token ids as the policy does, and can score whole
        sequences, with so many tokens before them."""
        ...

    async def score_tokens(
        self, token_ids: NDArray[np.int32], places: NDArray[np.int64]
    ) -> TeacherScores:
        """Score the tokens at `places`, each given those before it."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class JudgeDownError(Exception):
    """The judge gave no answer; the same question may get one later. `wait_s` is for how long it
    wants none."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class UnusableAnswerError(Exception):
    """The judge was asked, and its answer cannot be used; with `final`, nor will another. `answer`
    is its text, if it has one."""

    def __init__(self, message: str, answer: str = "", *, final: bool = False) -> None:
        super().__init__(message)
        self.answer = answer
        self.final = final


class JudgeRefusedError(ConfigError):
    """The judge refuses every question, or may cost no more; the message names the fix."""


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """What a judge wrote, and the tokens that it counts for it; 0 if it counts none."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Judge(Protocol):
    """A language model that compares attempts."""

    async def ask(self, messages: Sequence[Mapping[str, Any]], seed: int) -> JudgeAnswer:
        """Ask once, for its likeliest answer. Raises JudgeDownError, UnusableAnswerError and
        JudgeRefusedError."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class HintRenderer(Protocol):
    """Renders what only the teacher is told, as the policy would read it."""

    @property
    def first_id(self) -> int | None:
        """Id of the token that begins every conversation, if there is one."""
        ...

    def render_message(self, text: str) -> NDArray[np.int32]:
        """Render a message with this text; without the token that begins a conversation."""
        ...
