"""Ranks without tensors, for tests and for trying the loop: a few numbers that every batch
changes in its own way, so that any difference in training data or its order shows."""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from flotilla_common.weights.fingerprint import TensorEntry, checksum64, compute_fingerprint
from flotilla_learner.types import (
    BatchScore,
    CheckpointFiles,
    Comparison,
    Hypothesis,
    ModelInfo,
    Publication,
    StepResult,
    TrainBatch,
    VersionMismatch,
)

VOCAB_SIZE = 64
_SIZE = 16
CANARY = np.arange(5, dtype=np.int32)


class FakeRanks:
    """Deterministic ranks in this process. Implements `ports.Ranks`.

    `before` is called with the name of each method before it does anything."""

    def __init__(
        self,
        folder: Path,
        *,
        train_s: float = 0.0,
        before: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._folder = folder
        self.train_s = train_s
        self._before = before
        self.parameters = np.zeros(_SIZE, dtype=np.uint64)
        self.step = 0
        self.trained: list[TrainBatch] = []
        # Error of every engine in every token, and its explanations.
        self.abs_diff = 0.0
        self.hypotheses: tuple[Hypothesis, ...] = ()

    async def start_ranks(self, checkpoint: Path | None) -> ModelInfo:
        self._before("start")
        if checkpoint:
            data = np.fromfile(checkpoint / "model.bin", dtype=np.uint64)
            self.step, self.parameters = int(data[0]), data[1:]
        return ModelInfo(parameters=_SIZE, vocab_size=VOCAB_SIZE, step=self.step)

    async def train_step(self, batch: TrainBatch) -> StepResult:
        """Replace each parameter with a hash of the old ones and the batch."""
        self._before("train")
        await asyncio.sleep(self.train_s)
        digest = hashlib.sha256(self.parameters.tobytes())
        for sequence in batch.sequences:
            digest.update(f"{sequence.group_id}/{sequence.attempt_index}".encode())
            digest.update(np.float64(sequence.reward).tobytes())
            digest.update(sequence.token_ids.tobytes())
            digest.update(sequence.behaviour_logprobs.tobytes())
            digest.update(bytes([sequence.staleness]))
            if sequence.teacher is not None:
                digest.update(sequence.teacher.logprobs.tobytes())
                digest.update(sequence.teacher.top_logprobs.tobytes())
            for place in sequence.pictures:
                digest.update(f"{place.grid}{place.offset}".encode() + batch.pictures[place.sha256])
        seed = int.from_bytes(digest.digest()[:8])
        self.parameters = np.random.default_rng(seed).integers(0, 2**63, _SIZE, dtype=np.uint64)
        self.step = batch.step
        self.trained.append(batch)
        self._before("trained")
        return StepResult({"policy/loss": 0.0}, self.train_s, skipped=False)

    async def compare_batch(self, batch: TrainBatch, *, diagnose: bool = False) -> Comparison:
        tokens: dict[int, int] = {}
        for sequence in batch.sequences:
            assert all(place.sha256 in batch.pictures for place in sequence.pictures)
            version = batch.step - 1 - sequence.staleness
            tokens[version] = tokens.get(version, 0) + int(sequence.policy_mask.sum())
        off = self.abs_diff
        return Comparison(
            versions={
                v: VersionMismatch(n, off * off / 2, off, off, off) for v, n in tokens.items()
            },
            sequences=(off,) * len(batch.sequences),
            hypotheses=self.hypotheses if diagnose else (),
        )

    async def score_batch(self, batch: TrainBatch) -> BatchScore:
        """Return a loss of the parameters and the tokens, between 0 and 1."""
        self._before("score")
        digest = hashlib.sha256(self.parameters.tobytes())
        tokens = 0
        for sequence in batch.sequences:
            digest.update(sequence.token_ids.tobytes())
            tokens += int(sequence.policy_mask.sum())
        return BatchScore(tokens, int.from_bytes(digest.digest()[:4]) / 2**32)

    async def publish_weights(self, version: int) -> Publication:
        self._before("publish")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{version % 3}.bin"
        data = self.parameters.view(np.uint8)
        path.write_bytes(data.tobytes())
        manifest = (TensorEntry("weights", "uint64", (_SIZE,), 0, checksum64(data)),)
        return Publication(
            version=version,
            fingerprint=compute_fingerprint(manifest, data.nbytes),
            manifest=manifest,
            total_bytes=data.nbytes,
            path=path,
            canary_token_ids=CANARY,
            canary_logprobs=np.full(len(CANARY) - 1, -1.0, dtype=np.float32),
        )

    async def begin_checkpoint(self, directory: Path) -> Awaitable[CheckpointFiles]:
        self._before("save")
        data = np.concatenate([np.array([self.step], dtype=np.uint64), self.parameters]).tobytes()
        return asyncio.create_task(self._write_copy(directory, data))

    async def _write_copy(self, directory: Path, data: bytes) -> CheckpointFiles:
        await asyncio.to_thread(_write_synced, directory / "model.bin", data)
        self._before("saved")
        return CheckpointFiles(directory, {"model.bin": hashlib.sha256(data).hexdigest()})

    async def close(self) -> None:
        """Do nothing: no resources are held."""


def _write_synced(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
