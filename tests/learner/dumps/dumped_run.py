"""Runs of a learner with fake ranks that hand out numbers, and the real program of dumps."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from flotilla_common.process.python_command import python_command
from flotilla_common.spec.config import parse_config
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dumps import run_dumps as run_dumps_module
from flotilla_learner.dumps.jobs import DumpSetup
from flotilla_learner.dumps.run_dumps import RunDumps
from flotilla_learner.ranks import protocol
from flotilla_learner.types import Standing, StepResult, StepTokens, TrainBatch
from tests.support.demonstrations import make_demonstrations, write_file
from tests.support.fake_ranks import VOCAB_SIZE, FakeRanks
from tests.support.learner import FakeWorker, learner, make_config, write_tasks
from tests.support.pictures import FAMILY, SeeingWorker
from tests.support.rank_forge import shared_rank_forge

STEPS = 3
# Demonstrations of a run that imitates, and those of a step.
IMITATED, PER_STEP = 9, 4


class TellingRanks(FakeRanks):
    """Fake ranks that hand out numbers of every policy token, and remember them."""

    def __init__(self, folder: Path, shm: Path, stuck_at: int | None = None) -> None:
        """Take `stuck_at`, the step that never ends."""
        super().__init__(folder)
        self.shm = shm
        self._stuck_at = stuck_at
        self.before_step: Callable[[], Awaitable[None]] | None = None
        self.made_tokens: dict[int, StepTokens] = {}

    async def train_step(self, batch: TrainBatch) -> StepResult:
        if batch.step == self._stuck_at:
            await asyncio.Event().wait()
        if self.before_step is not None:
            await self.before_step()
        result = await super().train_step(batch)
        path = protocol.token_path(self.shm, "test", batch.step)
        tokens = self.made_tokens[batch.step] = make_tokens(batch)
        protocol.write_tokens(path, tokens)
        return replace(result, token_file=path)


def make_tokens(batch: TrainBatch) -> StepTokens:
    """Make up the numbers of a batch; those of every third sequence were not computed."""
    chooser = np.random.default_rng(batch.step)
    standings = [
        Standing.NO_SIGNAL if n % 3 == 2 else Standing.TRAINED for n in range(len(batch.sequences))
    ]
    counts = [int(each.policy_mask.sum()) for each in batch.sequences]
    columns = [
        tuple(
            np.full(count, np.nan, np.float32)
            if name and standing is Standing.NO_SIGNAL
            else -chooser.random(count, dtype=np.float32)
            for count, standing in zip(counts, standings, strict=True)
        )
        for name in (False, True, True, True)
    ]
    return StepTokens(tuple(standings), *columns)


def setup_of(tmp_path: Path, **changes: Any) -> DumpSetup:
    """Return a setup with a tokenizer of a word per token."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    words = {f"w{number} ": number for number in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(words, unk_token="w0 ")).save(str(model / "tokenizer.json"))
    values: dict[str, Any] = {"every": 1, "keep": 20, "picture_bytes": 2**20, **changes}
    return DumpSetup(str(tmp_path / "run"), str(model), None, **values)


@asynccontextmanager
async def run_dumps(
    tmp_path: Path, setup: DumpSetup, *, forked: bool = True
) -> AsyncGenerator[RunDumps]:
    """Yield dumps whose process is a fork of one that has imported its program, or a process of
    its own."""
    command = shared_rank_forge().python_command if forked else python_command
    dumps = RunDumps(setup, tmp_path / "dumps.log")
    with patch.object(run_dumps_module, "python_command", command):
        try:
            yield dumps
        finally:
            await dumps.close()


async def dumped_run(
    tmp_path: Path, setup: DumpSetup, *, in_step: bool = False, sees: bool = False, **changes: Any
) -> tuple[RunDumps, TellingRanks]:
    """Run a learner with evaluations to its end, its dumps included; `in_step` has each step wait
    for the dumps of those before it. If it `sees`, its attempts show pictures."""
    heldout = write_tasks(tmp_path / "heldout.json", 4, prefix="heldout")
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    ranks = TellingRanks(tmp_path / "weights", shm)
    values: dict[str, Any] = {
        "steps": STEPS,
        "eval": {"sets": [{"name": "heldout", "tasks": str(heldout), "attempts": 3}]},
        **changes,
    }
    async with (
        run_dumps(tmp_path, setup) as dumps,
        learner(
            *(tmp_path, make_config(tmp_path, **values), ranks),
            dumps=dumps,
            vision=FAMILY if sees else None,
        ) as running,
        (SeeingWorker if sees else FakeWorker)(running.address).working(),
    ):
        if in_step:
            ranks.before_step = dumps.finish
        await asyncio.wait_for(running.task, 90)
    return dumps, ranks


async def imitated_run(tmp_path: Path, setup: DumpSetup) -> tuple[RunDumps, TellingRanks]:
    """Run a learner that imitates random demonstrations to its end, its dumps included."""
    file = write_file(tmp_path / "demonstrations.npz", make_demonstrations(IMITATED))
    values: dict[str, Any] = {
        "objective": "sft",
        "sft": {"data": str(file), "sequences_per_step": PER_STEP},
        "steps": STEPS,
        "attach_grace_s": 0.2,
    }
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    ranks = TellingRanks(tmp_path / "weights", shm)
    given = parse_config(LearnerConfig, values, where="test")
    async with (
        run_dumps(tmp_path, setup) as dumps,
        learner(tmp_path, given, ranks, dumps=dumps) as running,
    ):
        ranks.before_step = dumps.finish
        await asyncio.wait_for(running.task, 90)
    return dumps, ranks


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
