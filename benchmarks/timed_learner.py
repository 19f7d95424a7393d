"""A learner whose ranks take time but no CPU, like GPUs, in a process of its own.

`python -m benchmarks.timed_learner FOLDER TRAIN_S CHANGES`, with `[learner]` keys as JSON. Its
services, journal and limits are real. It prints its address, and once a second its CPU seconds so
far, its memory and the longest blockage of its event loop."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from flotilla_common.process.loaded_objects import freeze_loaded_objects
from flotilla_common.rpc.free_ports import free_address
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.weights.fingerprint import (
    TensorEntry,
    TokenizerDigests,
    checksum64,
    compute_fingerprint,
)
from flotilla_learner.app import run_learner
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from flotilla_learner.types import ModelInfo, Publication, StepResult, TrainBatch
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import TOKENIZER, make_config, make_runtime

VOCABULARY = 151_936
SHARED = {"name": "test", "policy": {"model": "m", "dtype": "float32", "max_model_len": 2**17}}
_LAG_PROBE_S = 0.02


class TimedRanks(FakeRanks):
    """Ranks of a large vocabulary, with weights of a dtype that workers accept. They ignore the
    batch."""

    async def start_ranks(self, checkpoint: Path | None) -> ModelInfo:
        return replace(await super().start_ranks(checkpoint), vocab_size=VOCABULARY)

    async def train_step(self, batch: TrainBatch) -> StepResult:
        await asyncio.sleep(self.train_s)
        self.step = batch.step
        return StepResult({"policy/loss": 0.0}, self.train_s, skipped=False)

    async def publish_weights(self, version: int) -> Publication:
        made = await super().publish_weights(version)
        data = np.fromfile(made.path, np.uint8)
        entry = TensorEntry("weights", "float32", (len(data) // 4,), 0, checksum64(data))
        fingerprint = compute_fingerprint((entry,), len(data))
        return replace(made, manifest=(entry,), fingerprint=fingerprint)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Load of the learner at one moment; `lag_s` since the previous sample."""

    at: float
    cpu_s: float
    memory: int
    lag_s: float


@dataclass
class TimedLearner:
    """Learner as seen by its client."""

    address: str
    pid: int
    metrics: Path
    samples: list[LoadSample] = field(default_factory=list[LoadSample])

    @property
    def cores(self) -> float:
        """Return the number of cores that the learner kept busy, over all samples."""
        first, last = self.samples[0], self.samples[-1]
        return (last.cpu_s - first.cpu_s) / (last.at - first.at)

    def read_steps(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps so far."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if "timing/step" in row]


@asynccontextmanager
async def run_timed_learner(
    folder: Path, train_s: float, **changes: Any
) -> AsyncGenerator[TimedLearner]:
    """Run the learner in a process that ends with the block."""
    command = (sys.executable, "-m", "benchmarks.timed_learner", str(folder))
    process = await asyncio.create_subprocess_exec(
        *command, str(train_s), json.dumps(changes), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = json.loads(await process.stdout.readline())["address"]
        made = TimedLearner(address, process.pid, folder / "run" / "metrics.jsonl")
        reading = asyncio.create_task(_read_samples(process.stdout, made.samples))
        yield made
        reading.cancel()
    finally:
        process.kill()
        await process.wait()


async def _read_samples(lines: asyncio.StreamReader, into: list[LoadSample]) -> None:
    async for line in lines:
        if line.startswith(b'{"at"'):
            into.append(LoadSample(**json.loads(line)))


async def main(folder: Path, train_s: float, changes: dict[str, Any]) -> None:
    config = make_config(folder, **changes)
    address = free_address()
    runtime = make_runtime(folder, config, listen=address)
    runtime = replace(runtime, shared=parse_config(SharedConfig, SHARED, where="benchmark"))
    tracker = JsonlTracker(folder / "run" / "metrics.jsonl")
    print(json.dumps({"address": address}), flush=True)
    ranks = TimedRanks(folder / "weights", train_s=train_s)
    freeze_loaded_objects()
    watching = asyncio.create_task(_tell_load())
    await run_learner(runtime, LearnerDependencies(ranks, tracker, TokenizerDigests(TOKENIZER)))
    watching.cancel()


async def _tell_load() -> None:
    own, reported, lag = psutil.Process(), time.monotonic(), 0.0
    while True:
        began = time.monotonic()
        await asyncio.sleep(_LAG_PROBE_S)
        now = time.monotonic()
        lag = max(lag, now - began - _LAG_PROBE_S)
        if now - reported >= 1.0:
            load = {"at": now, "cpu_s": time.process_time(), "memory": own.memory_info().rss}
            print(json.dumps({**load, "lag_s": lag}), flush=True)
            reported, lag = now, 0.0


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])))
